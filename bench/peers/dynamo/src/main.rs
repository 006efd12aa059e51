//! A driver of the index benchmark for Dynamo's router crate; `bench/README.md` has the protocol.

mod bench;
mod command;
mod fixture;
mod measure;
mod tree;

use std::io::{self, BufRead, Write};
use std::time::Duration;

use bench::{Bench, Loaded};
use command::Command;
use fixture::{Fixture, Lengths};
use serde_json::{Value, json};

fn main() -> io::Result<()> {
    let mut bench = None;
    for line in io::stdin().lock().lines() {
        let line = line?;
        let answer = answer(&line, &mut bench).unwrap_or_else(|error| json!({"error": error}));
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{answer}")?;
        stdout.flush()?;
        if line.trim() == "quit" {
            break;
        }
    }
    Ok(())
}

fn answer(line: &str, bench: &mut Option<Bench>) -> Result<Value, String> {
    let command = Command::parse(line)?;
    match (command.verb, bench) {
        ("hello", _) => Ok(json!({"driver": "dynamo", "version": "dynamo-kv-router 1.6.1"})),
        ("quit", _) => Ok(json!({})),
        ("load", bench @ None) => {
            let loaded = Bench::load(fixture(&command)?)?;
            let Loaded { memberships, seconds, rss_before, rss_after, .. } = loaded;
            let answer = json!({
                "memberships": memberships,
                "seconds": seconds,
                "rss_before": rss_before,
                "rss_after": rss_after,
                "hop_ns": loaded.bench.hop_ns,
            });
            *bench = Some(loaded.bench);
            Ok(answer)
        }
        ("load", Some(_)) => Err("load: once a process".to_owned()),
        ("check", Some(bench)) => {
            let workload = command.text("workload")?;
            Ok(bench.check(workload).map_or_else(|| unsupported(workload), |sum| json!({"answers": sum})))
        }
        ("run", Some(bench)) => {
            let workload = command.text("workload")?;
            let seconds = command.number("seconds")?;
            let length = Duration::try_from_secs_f64(seconds)
                .map_err(|error| format!("seconds={seconds}: {error}"))?;
            match bench.run(workload, length) {
                Some(result) => result.map_err(|error| error.to_string()),
                None => Ok(unsupported(workload)),
            }
        }
        ("check" | "run", None) => Err(format!("{}: nothing is loaded", command.verb)),
        (verb, _) => Err(format!("{verb}: not a command")),
    }
}

fn unsupported(workload: &str) -> Value {
    json!({"unsupported": workload})
}

fn fixture(command: &Command) -> Result<Fixture, String> {
    let fixture = Fixture {
        prompts: command.positive("prompts")?,
        blocks: command.positive("blocks")?,
        holders: command.positive("holders")?,
        lengths: match command.text("lengths")? {
            "equal" => Lengths::Equal,
            "unequal" => Lengths::Unequal,
            "random" => Lengths::Random,
            other => return Err(format!("lengths={other}: none of equal, unequal, random")),
        },
        event_blocks: command.positive("event_blocks")?,
        workers: command.positive("workers")?,
        seed: command.number("seed")?,
    };
    if fixture.holders > fixture.workers || fixture.workers > 1024 {
        return Err("holders ≤ workers ≤ 1024 is required".to_owned());
    }
    Ok(fixture)
}
