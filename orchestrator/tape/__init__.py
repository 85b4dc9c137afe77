"""The tape of a job: every event and the decisions on it, one line per step, readable by people and by replay."""
