"""report.json as a page: self-contained, readable on a phone, in light and in dark, without a network."""
