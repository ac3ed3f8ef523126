"""The process that writes `/metrics`: started when somebody first asks for it."""
