//! Prototype measurements.
use kvscout_native::events::{Batch, Event, Removed, Stored};
use kvscout_native::index::{Bounds, Index, WorkerOptions, WorkerRank};
use kvscout_native::table::mix;
use std::sync::Arc;
use std::time::Instant;

fn rss() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}
fn name(i: usize) -> WorkerRank {
    WorkerRank { worker_id: Arc::from(format!("w{i}")), dp_rank: 0 }
}
fn prompt(seed: u64, n: usize) -> Vec<u64> {
    (0..n as u64).map(|i| mix(seed << 24 | i, 77)).collect()
}
fn engine(seed: u64, n: usize) -> Vec<u64> {
    (0..n as u64).map(|i| mix(seed << 24 | i, 1234567)).collect()
}
fn stored(p: &[u64], e: &[u64], parent: Option<u64>) -> Batch {
    Batch {
        events: vec![Event::Stored(Box::new(Stored {
            engine_hashes: e.to_vec(),
            parent,
            local_hashes: p.to_vec(),
            full_attention: true,
            ..Default::default()
        }))],
        ..Default::default()
    }
}
fn pct(mut v: Vec<f64>) -> String {
    v.sort_by(f64::total_cmp);
    format!(
        "mean {:.3} p50 {:.3} p99 {:.3} us",
        v.iter().sum::<f64>() / v.len() as f64,
        v[v.len() / 2],
        v[v.len() * 99 / 100]
    )
}
fn bench_find(index: &Index, prompts: &[Vec<u64>], label: &str) {
    let mut state = 1u64;
    let mut v = Vec::new();
    let mut rows = 0;
    let n = 20000;
    for _ in 0..n {
        state = mix(state.wrapping_add(1), 3);
        let p = &prompts[(state % prompts.len() as u64) as usize];
        let mut slice = &p[..];
        // the request was just received: its bytes are in the cache
        std::hint::black_box(p.iter().fold(0, |a, b| a ^ b));
        let t = Instant::now();
        rows += index.find(&mut slice, 0.0, false, |rows, _| rows.len());
        v.push(t.elapsed().as_secs_f64() * 1e6);
    }
    println!("{label}: {} rows/query {}", pct(v), rows / n);
}
fn main() {
    let arg: Vec<String> = std::env::args().collect();
    let big = arg.iter().any(|a| a == "big");
    let only: Vec<&String> = arg.iter().skip(1).filter(|a| a.starts_with("=")).collect();
    for (label, memberships) in [("hot", 10_000 * 8usize), ("10M", 10_000_000)] {
        if label == "10M" && !big {
            continue;
        }
        for mode in ["equal8", "unequal8", "unequal8-long-first", "unequal64", "one", "one4"] {
            if !only.is_empty() && !only.iter().any(|o| &o[1..] == mode) {
                continue;
            }
            let index =
                Index::new(16, false, Bounds { max_blocks: 0, max_predictions: 1 << 20, prune_ratio: 0.8 });
            let names: Vec<_> = (0..64).map(name).collect();
            for n in &names {
                index.add_worker(n.name(), WorkerOptions::default());
            }
            let holders = match mode {
                "unequal64" => 64,
                "one" | "one4" => 1,
                _ => 8,
            };
            let nprompts = memberships / 1024 / holders + 1;
            let prompts: Vec<_> = (0..nprompts as u64).map(|s| prompt(s, 1024)).collect();
            let before = rss();
            let mut spent = 0.0;
            let mut blocks = 0usize;
            for (s, p) in prompts.iter().enumerate() {
                let e = engine(s as u64, 1024);
                for h in 0..holders {
                    let len = match mode {
                        "unequal8" | "unequal64" => 1024 * (h + 1) / holders,
                        "unequal8-long-first" => 1024 * (holders - h) / holders,
                        _ => 1024,
                    };
                    let w = &names[(s * 8 + h) % 64];
                    if mode == "one4" {
                        continue;
                    }
                    let b = stored(&p[..len], &e[..len], None);
                    let t = Instant::now();
                    index.apply(w.name(), &b, 0, None);
                    spent += t.elapsed().as_secs_f64();
                    blocks += len;
                }
            }
            if mode == "one4" {
                let es: Vec<_> = (0..nprompts as u64).map(|s| engine(s, 1024)).collect();
                for i in 0..256 {
                    for (s, p) in prompts.iter().enumerate() {
                        let (a, z) = (i * 4, i * 4 + 4);
                        let b = stored(&p[a..z], &es[s][a..z], (a > 0).then(|| es[s][a - 1]));
                        let t = Instant::now();
                        index.apply(names[s * 8 % 64].name(), &b, 0, None);
                        spent += t.elapsed().as_secs_f64();
                        blocks += 4;
                    }
                }
                drop(es);
            }
            let after = rss();
            println!(
                "{label} {mode}: {blocks} memberships, {:.1} B each (rss {} MB), store {:.4} us a block",
                (after - before) as f64 / blocks as f64,
                (after - before) >> 20,
                spent * 1e6 / blocks as f64
            );
            bench_find(&index, &prompts, &format!("  {label} {mode} find"));
            let mut per = Vec::new();
            for i in 0..500u64 {
                let p = prompt(1 << 31 | i, 1024);
                let e = engine(1 << 31 | i, 1024);
                let b = stored(&p, &e, None);
                let t = Instant::now();
                index.apply(names[i as usize % 64].name(), &b, 0, None);
                per.push(t.elapsed().as_secs_f64() * 1e6 / 1024.);
            }
            println!("  store 1024 new, a block: {}", pct(per));
            let mut per = Vec::new();
            for i in 0..500u64 {
                let p = prompt(1 << 31 | i, 1024);
                let e = engine(1 << 31 | i, 1024);
                let b = stored(&p, &e, None);
                let t = Instant::now();
                index.apply(names[(i as usize + 1) % 64].name(), &b, 0, None);
                per.push(t.elapsed().as_secs_f64() * 1e6 / 1024.);
            }
            println!("  store 1024 known, a block: {}", pct(per));
            // small events: extend and remove 4
            let mut st = Vec::new();
            let mut rm = Vec::new();
            for i in 0..5000u64 {
                let s = (mix(i, 5) % nprompts as u64) as usize;
                let last = engine(s as u64, 1024)[1023];
                let new = prompt(1 << 30 | i, 4);
                let ne = engine(1 << 30 | i, 4);
                let w = &names[s * 8 % 64];
                if mode.starts_with("unequal8") || mode == "unequal64" {
                    continue;
                }
                let b = stored(&new, &ne, Some(last));
                let t = Instant::now();
                index.apply(w.name(), &b, 0, None);
                st.push(t.elapsed().as_secs_f64() * 1e6);
            }
            for i in 0..5000u64 {
                let s = (mix(i, 5) % nprompts as u64) as usize;
                let ne: Vec<u64> = engine(1 << 30 | i, 4).into_iter().rev().collect();
                let w = &names[s * 8 % 64];
                if mode.starts_with("unequal8") || mode == "unequal64" {
                    continue;
                }
                let b = Batch {
                    events: vec![Event::Removed(Removed { engine_hashes: ne, tier: 0, group: 0 })],
                    ..Default::default()
                };
                let t = Instant::now();
                index.apply(w.name(), &b, 0, None);
                rm.push(t.elapsed().as_secs_f64() * 1e6);
            }
            if !st.is_empty() {
                println!("  store 4: {}", pct(st));
                println!("  remove 4: {}", pct(rm));
            }
        }
    }
}
