"""What Prometheus scrapes: the catalogue of names, and the values behind them."""
