"""Dynamic nets against DyNet."""
