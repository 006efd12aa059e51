"""Costs of workers from columns of numbers, and the draw from them; pure."""
