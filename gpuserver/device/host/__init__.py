"""An emulated GPU: host memory with a limit, and links with a speed."""
