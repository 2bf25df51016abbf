"""The engine: compute thread, residency, slots, generation, memory plan, command line."""
