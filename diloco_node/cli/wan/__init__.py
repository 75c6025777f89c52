"""`diloco-node wan`: an emulated WAN, by hand."""
