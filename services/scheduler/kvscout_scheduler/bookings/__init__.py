"""Bookings, from reservation to end."""
