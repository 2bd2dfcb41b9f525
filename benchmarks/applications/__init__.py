"""Every architecture of keras.applications under a budget."""
