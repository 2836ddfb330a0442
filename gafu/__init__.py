"""Generation-aware understanding (GToken and injection) on the same runtime."""
