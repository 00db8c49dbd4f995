//! The checks of the fuzz targets `nbd_handshake` and `nbd_requests`.
