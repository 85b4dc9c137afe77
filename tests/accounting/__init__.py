"""Goodput, token conservation, recoveries and the report, on stories small enough to add up by hand."""
