"""What ops cost: from a device's data sheet, or measured on the device."""
