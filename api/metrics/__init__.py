"""The service's metrics for Prometheus: the catalogue of names, and the values behind them."""
