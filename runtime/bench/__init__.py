"""`moestream bench`: arms side by side, rows in a ledger, pictures of them."""
