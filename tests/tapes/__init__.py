"""The record: its lines, its files, and deciding the same again."""
