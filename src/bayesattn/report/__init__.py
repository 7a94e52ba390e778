"""Results for people: tables in the terminal, pictures on disk."""
