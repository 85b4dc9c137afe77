"""What the service must not forget: rows in SQLite or PostgreSQL, and the migrations that bring a database up to date."""
