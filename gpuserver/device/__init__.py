"""One GPU, real or emulated, behind one protocol. In: what to map, copy and count. Out: storages, and why not."""
