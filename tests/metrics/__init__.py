"""What operators are shown: `/metrics`, the alerts on it, the dashboards over it, and how all of that is deployed."""
