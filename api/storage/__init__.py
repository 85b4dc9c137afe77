"""The service's durable state: rows in SQLite or PostgreSQL, and the migrations that bring a database up to date."""
