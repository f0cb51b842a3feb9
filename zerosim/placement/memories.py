"""A rank's memories: its device's, and its node's host memory and NVMe drives, which all ranks of the node share."""

DEVICE, HOST, NVME = "device", "host", "nvme"
MEMORIES = (DEVICE, HOST, NVME)
