"""Short programs that use moestream; each is run by tests/test_examples.py."""
