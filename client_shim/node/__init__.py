"""The shim's connection to a node. In: leases, uploads and frames. Out: messages on links, and the replies."""
