"""Carrying out a packed batch on a device with torch; decides nothing about what is batched."""
