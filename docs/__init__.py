"""What people read of atoll, and the programs that make the pages which say what the code says."""
