"""The output in a terminal: live tables, a tape's records as sentences, a finished job in three lines."""
