//! Page-aligned buffers: unique and writable, then shared and read-only.
