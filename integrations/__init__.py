"""The engine inside other people's programs: an HTTP server, and adapters for trainers. Each is an extra of its own."""
