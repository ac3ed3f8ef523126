"""The dashboard: the page's files, and a live stream of the node's activity."""
