"""What must hold in every simulated job, whatever strikes it."""
