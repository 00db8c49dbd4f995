//! What every accepting end does with what it receives.

use std::future::Future;

use tokio::time::timeout;

use super::connection::Control;
use super::error_frame::decode_error;
use super::flow::SILENCE;
use super::frame::{FrameType, Header};
use super::io::{End, FrameReader};

/// Runs both halves of an accepted connection. When a frame is refused, the other end is sent the
/// reason.
pub(super) async fn end_of(
    control: &Control,
    receive: impl Future<Output = End>,
    sending: impl Future<Output = End>,
) -> End {
    tokio::pin!(sending);
    tokio::select! {
        end = receive => {
            if let End::Wire(error) = end {
                control.close(error.code(), error.to_string());
                let _ = sending.await;
            }
            end
        }
        end = &mut sending => end,
    }
}

/// Reads the header of the next frame that an acceptor receives. Without one for 15 s the dialer
/// is gone.
pub(super) async fn next_header(reader: &mut FrameReader) -> Result<Header, End> {
    timeout(SILENCE, reader.header()).await.unwrap_or(Err(End::Silent))
}

/// Handles the frames that every acceptor receives. Returns the header of another one.
pub(super) async fn common_frame(
    reader: &mut FrameReader,
    header: Header,
    control: &Control,
) -> Result<Option<Header>, End> {
    match header.kind {
        FrameType::Ping => {
            reader.body(header, None).await?;
            control.pong(header.request_id);
            Ok(None)
        }
        FrameType::Close => {
            let frame = timeout(SILENCE, reader.body(header, None)).await;
            let error = decode_error(&frame.unwrap_or(Err(End::Silent))?)?;
            tracing::debug!(%error, "the dialer has closed the connection");
            Err(End::Closed)
        }
        _ => Ok(Some(header)),
    }
}
