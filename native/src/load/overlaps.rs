//! Overlaps of one prompt with the caches of many workers, as an indexer answers them: rows, read once.

use crate::protobuf::{Field, Reader};

/// One worker rank. Tiers are cumulative, none below the faster one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Where the worker id is among the names.
    start: u32,
    end: u32,
    pub dp_rank: u32,
    /// Confirmed or predicted, whichever reaches further.
    pub device: u32,
    pub host: u32,
    pub slowest: u32,
}

/// The columns of `kvscout.v1.Overlaps`, which the message has in this order from field 2 on.
#[derive(Debug, Default)]
pub struct Columns {
    pub dp_ranks: Vec<u32>,
    /// Device, host, disk, external.
    pub tiers: [Vec<u32>; 4],
    pub predicted: Vec<u32>,
}

/// Overlap of every worker rank without a row: device, host, disk, external, and with predictions.
pub type Others = [u32; 5];

#[derive(Debug, Default)]
pub struct Overlaps {
    /// What the names are parts of: the message, or nothing but them.
    text: Box<[u8]>,
    rows: Vec<Row>,
    columns: Columns,
    others: Option<Others>,
    /// The largest number in any column, and of the device.
    most: u32,
    longest_on_device: u32,
    /// Whether anything but the device is known of.
    pub slower_tiers: bool,
}

impl Overlaps {
    /// Reads a serialised `Overlaps`; None: it is not of the usual shape, or its columns contradict each other.
    pub fn parse(message: &[u8]) -> Option<Self> {
        u32::try_from(message.len()).ok()?;
        let (mut names, mut columns, mut others) = (Vec::new(), Columns::default(), None);
        let mut reader = Reader::new(message);
        while let Some(field) = reader.next()? {
            let (number, Field::Bytes(value)) = field else { return None };
            let column = match number {
                1 => {
                    if !value.is_ascii() {
                        std::str::from_utf8(value).ok()?;
                    }
                    let start = value.as_ptr() as usize - message.as_ptr() as usize;
                    names.push((start as u32, (start + value.len()) as u32));
                    continue;
                }
                2 => &mut columns.dp_ranks,
                3..=6 => &mut columns.tiers[number as usize - 3],
                7 => &mut columns.predicted,
                8 if others.is_none() => {
                    others = Some(common(value)?);
                    continue;
                }
                8 => return None,
                _ => continue, // of a later version
            };
            let mut numbers = Reader::new(value);
            column.reserve(names.len());
            while !numbers.is_empty() {
                column.push(numbers.varint()? as u32);
            }
        }
        Self::new(message.into(), &names, columns, others)
    }

    /// What an index finds: a worker rank, and its leading blocks on device, host, disk, external, and with predictions.
    pub fn of_rows<'a>(
        ranks: impl ExactSizeIterator<Item = (&'a str, u32)>,
        blocks: impl Fn(usize, usize) -> u32,
        others: Option<Others>,
    ) -> Option<Self> {
        let (mut text, mut names, mut dp_ranks) = (Vec::new(), Vec::with_capacity(ranks.len()), Vec::new());
        for (worker_id, dp_rank) in ranks {
            let start = text.len() as u32;
            text.extend_from_slice(worker_id.as_bytes());
            names.push((start, text.len() as u32));
            dp_ranks.push(dp_rank);
        }
        let column = |level: usize| (0..names.len()).map(|row| blocks(row, level)).collect::<Vec<_>>();
        let [device, host, disk, external, predicted] = [0, 1, 2, 3, 4].map(column);
        // Columns that say nothing new are left out, as in a message.
        let slower = [host, disk, external];
        let slower = if slower.iter().all(|column| *column == device) { Default::default() } else { slower };
        let predicted = if predicted == device { Vec::new() } else { predicted };
        let [host, disk, external] = slower;
        if dp_ranks.iter().all(|rank| *rank == 0) {
            dp_ranks.clear();
        }
        let columns = Columns { dp_ranks, tiers: [device, host, disk, external], predicted };
        Self::new(text.into(), &names, columns, others)
    }

    /// Rows of columns; None: they contradict each other.
    ///
    /// `names` says where in the text each worker id begins and ends.
    pub fn new(
        text: Box<[u8]>,
        names: &[(u32, u32)],
        columns: Columns,
        others: Option<Others>,
    ) -> Option<Self> {
        let rows = names.len();
        let complete = |column: &[u32]| column.is_empty() || column.len() == rows;
        let [device, slower @ ..] = &columns.tiers;
        let all_complete = slower.iter().chain([&columns.dp_ranks, &columns.predicted]).all(|c| complete(c));
        if device.len() != rows || !all_complete {
            return None;
        }
        let slower_tiers = slower.iter().any(|column| !column.is_empty());
        let mut made = Self { text, rows: Vec::with_capacity(rows), slower_tiers, ..Self::default() };
        for (row, &(start, end)) in names.iter().enumerate() {
            let confirmed = device[row];
            let reach = |column: &[u32], faster: u32| match column.get(row) {
                Some(&blocks) if blocks < faster => None,
                Some(&blocks) => Some(blocks),
                None => Some(faster),
            };
            let host = reach(&slower[0], confirmed)?;
            let disk = reach(&slower[1], host)?;
            let external = reach(&slower[2], disk)?;
            let predicted = reach(&columns.predicted, confirmed)?;
            let dp_rank = columns.dp_ranks.get(row).copied().unwrap_or(0);
            let (host, slowest) = (host.max(predicted), external.max(predicted));
            made.rows.push(Row { start, end, dp_rank, device: predicted, host, slowest });
            made.most = made.most.max(slowest);
            made.longest_on_device = made.longest_on_device.max(confirmed);
        }
        if let Some([device, host, disk, external, predicted]) = others {
            if host < device || disk < host || external < disk || predicted < device {
                return None;
            }
            made.slower_tiers |= external > device;
            made.most = made.most.max(external).max(predicted);
            made.longest_on_device = made.longest_on_device.max(device);
        }
        (made.columns, made.others) = (columns, others);
        Some(made)
    }

    /// Whether no row says more than a prompt has.
    pub fn within(&self, blocks: u64) -> bool {
        u64::from(self.most) <= blocks
    }

    /// (worker id, row)
    pub fn rows(&self) -> impl ExactSizeIterator<Item = (&[u8], &Row)> {
        self.rows.iter().map(|row| (&self.text[row.start as usize..row.end as usize], row))
    }

    /// What a worker rank without a row has, as a row.
    pub fn rest(&self) -> Row {
        let [device, host, _, external, predicted] = self.others.unwrap_or_default();
        let (start, end, dp_rank) = (0, 0, 0);
        let device = device.max(predicted);
        Row { start, end, dp_rank, device, host: host.max(device), slowest: external.max(device) }
    }

    pub fn others(&self) -> Option<Others> {
        self.others
    }

    /// The most blocks that are confirmed on the device of any worker rank.
    pub fn longest_on_device(&self) -> u32 {
        self.longest_on_device
    }

    /// The columns that the rows were made of.
    pub fn columns(&self) -> &Columns {
        &self.columns
    }
}

/// A `CommonOverlap`; None: it is not of the usual shape.
fn common(message: &[u8]) -> Option<Others> {
    let (mut others, mut reader) = (Others::default(), Reader::new(message));
    while let Some(field) = reader.next()? {
        match field {
            (number @ 3..=7, Field::Varint(value)) => others[number as usize - 3] = value as u32,
            (3..=7, _) => return None,
            _ => {} // who has them, and what later versions say
        }
    }
    Some(others)
}

impl Row {
    /// Blocks as the cost counts them: device + host_weight · more on the host + disk_weight · more below.
    pub fn effective(&self, host_weight: f64, disk_weight: f64) -> f64 {
        let (device, host, slowest) = (f64::from(self.device), f64::from(self.host), f64::from(self.slowest));
        device + host_weight * (host - device) + disk_weight * (slowest - host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protobuf::Writer;

    fn columns(tiers: [&[u32]; 4], predicted: &[u32]) -> Columns {
        Columns { dp_ranks: Vec::new(), tiers: tiers.map(<[u32]>::to_vec), predicted: predicted.to_vec() }
    }

    #[test]
    fn slower_tiers_and_predictions_reach_at_least_as_far() {
        let columns = columns([&[2, 5], &[4, 5], &[], &[8, 5]], &[3, 5]);
        let overlaps = Overlaps::new((*b"ab").into(), &[(0, 1), (1, 2)], columns, None).unwrap();
        let rows: Vec<_> = overlaps.rows().collect();
        assert_eq!(rows[0].0, b"a");
        assert_eq!((rows[0].1.device, rows[0].1.host, rows[0].1.slowest), (3, 4, 8));
        assert_eq!(rows[0].1.effective(0.75, 0.25), 3.0 + 0.75 + 1.0);
        assert_eq!((rows[1].0, rows[1].1.device), (&b"b"[..], 5));
        assert!(overlaps.within(8) && !overlaps.within(7) && overlaps.slower_tiers);
    }

    #[test]
    fn columns_that_contradict_each_other_are_none() {
        let (short, low) = (columns([&[2], &[], &[], &[]], &[]), columns([&[2, 5], &[1, 5], &[], &[]], &[]));
        for columns in [short, low, columns([&[2, 5], &[], &[], &[]], &[1, 5])] {
            let shown = format!("{columns:?}");
            assert!(Overlaps::new((*b"ab").into(), &[(0, 1), (1, 2)], columns, None).is_none(), "{shown}");
        }
    }

    #[test]
    fn a_message_is_read() {
        let mut message = Writer::default();
        message.bytes(1, b"w-0");
        message.bytes(1, b"w-1");
        message.packed(2, [0, 3].into_iter());
        message.packed(3, [300, 1].into_iter());
        let overlaps = Overlaps::parse(message.as_bytes()).unwrap();
        let rows: Vec<_> = overlaps.rows().map(|(id, row)| (id, row.dp_rank, row.device)).collect();
        assert_eq!(rows, [(&b"w-0"[..], 0, 300), (b"w-1", 3, 1)]);
        assert!(Overlaps::parse(&message.as_bytes()[1..]).is_none());
        assert!(Overlaps::parse(&[0x08, 1]).is_none(), "a column that is not packed");
    }
}
