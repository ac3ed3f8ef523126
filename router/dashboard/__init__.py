"""What people at a browser are shown: the page's files, and a live stream of what the node does."""
