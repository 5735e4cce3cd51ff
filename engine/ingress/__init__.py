"""Serving: doors that speak what clients speak, and the backend behind them."""
