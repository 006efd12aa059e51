"""Cells: policies side by side on one workload and cluster, with measures, bounds, tables and plots."""
