"""The rig: the real router and the real engines, with real KV transfer, on a machine without a GPU."""
