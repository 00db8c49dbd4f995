//! Opening a target: block device or file, durability, choice of engine.
