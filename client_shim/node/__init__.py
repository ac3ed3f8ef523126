"""The shim's way to a node. In: leases, uploads and frames. Out: messages on links, and what came back."""
