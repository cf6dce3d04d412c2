"""Long loads and faults on a server: soak, chaos and overload, with every answer checked."""
