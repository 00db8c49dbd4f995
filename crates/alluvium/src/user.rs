//! `alluvium user`: manages the users who log in with a password. It uses the control socket, so
//! that the first user can be created without another one.

use std::io::{IsTerminal as _, Read as _};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Serialize;

use crate::config::limits;
use crate::control::{self, Reply, Request};
use crate::output::{self, Failure, Table};
use crate::password::first_line;

#[derive(Debug, Subcommand)]
pub(crate) enum UserCommand {
    /// Add a user, or change its password, for SCRAM-SHA-256, SCRAM-SHA-512 and PLAIN.
    ///
    /// The password is the first line of standard input, or of a file.
    Add {
        /// Name of the user: 1 to 255 bytes, no control characters.
        name: String,
        /// Read the password from this file.
        #[arg(long, value_name = "FILE")]
        password_file: Option<PathBuf>,
        #[command(flatten)]
        common: Common,
    },
    /// List the users.
    List {
        #[command(flatten)]
        common: Common,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Delete a user. Open connections stay until they have to authenticate again.
    Delete {
        /// Name of the user.
        name: String,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Args, Debug)]
pub(crate) struct Common {
    /// The data directory of the running server.
    #[arg(long, env = "ALLUVIUM_DATA_DIR", value_name = "DIR", default_value = limits::DATA_DIR)]
    data_dir: PathBuf,
}

impl Common {
    fn ask(&self, request: &Request) -> Result<Reply, Failure> {
        control::ask(&self.data_dir.join(control::SOCKET), request)
    }
}

#[derive(Serialize)]
struct User {
    name: String,
    mechanisms: Vec<String>,
}

/// Runs a `user` command.
///
/// # Errors
/// No server runs in that directory, or it refuses.
pub(crate) fn run(command: UserCommand) -> Result<(), Failure> {
    match command {
        UserCommand::Add { name, password_file, common } => {
            let password = read_password(password_file)?;
            common.ask(&Request::SetPassword { user: name, password }).map(drop)
        }
        UserCommand::Delete { name, common } => {
            common.ask(&Request::DeleteUser { user: name }).map(drop)
        }
        UserCommand::List { common, json } => {
            let Reply::Users(users) = common.ask(&Request::ListUsers)? else {
                return Err(Failure::Failed("unexpected answer of the server".into()));
            };
            if json {
                let user = |(name, mechanisms)| User { name, mechanisms };
                return output::json(&users.into_iter().map(user).collect::<Vec<_>>());
            }
            let mut table = Table::of_text(&["user", "password for"]);
            for (name, mechanisms) in users {
                table.row(vec![name, mechanisms.join(", ")]);
            }
            output::line(table)
        }
    }
}

fn read_password(file: Option<PathBuf>) -> Result<String, Failure> {
    let mut text = String::new();
    match file {
        Some(file) => {
            let failed = |error| Failure::Failed(format!("{}: {error}", file.display()));
            text = std::fs::read_to_string(&file).map_err(failed)?;
        }
        None => {
            let mut stdin = std::io::stdin().lock();
            if stdin.is_terminal() {
                eprintln!("Enter the password, then Enter and Ctrl-D (it is shown):");
            }
            stdin.read_to_string(&mut text).map_err(Failure::new)?;
        }
    }
    let password = first_line(text.as_bytes()).map_err(|reason| Failure::Usage(reason.into()))?;
    Ok(String::from_utf8_lossy(password).into_owned())
}
