//! Bars side by side: several measurements of the same few things, each with a scale of its own.

use std::fmt::Write as _;

use crate::{COLOURS, STYLE, WIDTH, escape, opening_tag};

/// A chart of panels with horizontal bars.
pub struct Bars {
    /// In large letters.
    pub title: String,
    /// Under the title: what was measured, and in which unit.
    pub subtitle: String,
    /// In two columns.
    pub panels: Vec<Panel>,
}

/// One measurement. Its bars begin at zero, and the longest one fills the width: lengths compare
/// within a panel, not between two.
pub struct Panel {
    /// What was measured.
    pub title: String,
    /// From above.
    pub bars: Vec<Bar>,
}

/// A bar. Bars of the same name have the same colour in all panels; there are at most eight names,
/// so that the colours are distinguishable.
pub struct Bar {
    /// To its left.
    pub name: String,
    /// Not negative. Written at its end.
    pub value: f64,
}

const COLUMNS: usize = 2;
const TOP: f64 = 64.0;
const MARGIN: f64 = 24.0;
const COLUMN: f64 = (WIDTH - 2.0 * MARGIN) / COLUMNS as f64;
/// Of a column: names, then bars, then values.
const NAMES: f64 = 72.0;
const LONGEST: f64 = 240.0;
const TITLE: f64 = 24.0;
const ROW: f64 = 20.0;
const BAR: f64 = 13.0;
const BETWEEN: f64 = 18.0;

impl Panel {
    fn height(&self) -> f64 {
        TITLE + ROW * self.bars.len() as f64 + BETWEEN
    }
}

/// Three digits, without needless zeros.
fn number(value: f64) -> String {
    let decimals = match value {
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        value if value >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

impl Bars {
    /// The file's content.
    pub fn render(&self) -> String {
        let mut names: Vec<&str> = Vec::new();
        for bar in self.panels.iter().flat_map(|panel| &panel.bars) {
            if !names.contains(&bar.name.as_str()) {
                names.push(&bar.name);
            }
        }
        let heights = |row: &[Panel]| row.iter().map(Panel::height).fold(0.0, f64::max);
        let height = TOP + self.panels.chunks(COLUMNS).map(heights).sum::<f64>();

        let mut svg = String::new();
        let mut line =
            |text: std::fmt::Arguments<'_>| writeln!(svg, "{text}").expect("a string takes all");
        line(format_args!("{}", opening_tag(height)));
        line(format_args!("<title>{}</title>", escape(&self.title)));
        line(format_args!("{STYLE}"));
        line(format_args!(r#"<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>"#));
        line(format_args!(
            r#"<text class="title" x="{MARGIN}" y="26">{}</text>"#,
            escape(&self.title)
        ));
        line(format_args!(
            r#"<text class="note" x="{MARGIN}" y="45">{}</text>"#,
            escape(&self.subtitle)
        ));
        let mut top = TOP;
        for row in self.panels.chunks(COLUMNS) {
            for (column, panel) in row.iter().enumerate() {
                let left = MARGIN + COLUMN * column as f64;
                let start = left + NAMES;
                let y = top + 14.0;
                line(format_args!(
                    r#"<text class="heading" x="{start}" y="{y}">{}</text>"#,
                    escape(&panel.title)
                ));
                let most = panel.bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
                for (n, bar) in panel.bars.iter().enumerate() {
                    let colour = names.iter().position(|name| *name == bar.name).unwrap_or(0);
                    let colour = COLOURS[colour % COLOURS.len()];
                    let length = if most > 0.0 { bar.value / most * LONGEST } else { 0.0 };
                    let y = top + TITLE + ROW * n as f64;
                    let (text, names_end) = (y + 11.0, start - 6.0);
                    line(format_args!(
                        r#"<text class="end" x="{names_end}" y="{text}">{}</text>"#,
                        escape(&bar.name)
                    ));
                    line(format_args!(
                        "<rect x=\"{start}\" y=\"{y}\" width=\"{length:.1}\" height=\"{BAR}\" \
                         fill=\"{colour}\"/>"
                    ));
                    let values = start + length + 6.0;
                    line(format_args!(
                        r#"<text class="note" x="{values:.1}" y="{text}">{}</text>"#,
                        number(bar.value)
                    ));
                }
            }
            top += heights(row);
        }
        line(format_args!("</svg>"));
        svg
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(title: &str, bars: &[(&str, f64)]) -> Panel {
        let bar = |(name, value): &(&str, f64)| Bar { name: (*name).into(), value: *value };
        Panel { title: title.into(), bars: bars.iter().map(bar).collect() }
    }

    #[test]
    fn bars_have_the_length_of_their_values_within_a_panel() {
        let svg = Bars {
            title: "a < b & c".into(),
            subtitle: "us".into(),
            panels: vec![
                panel("reads", &[("ours", 1.0), ("theirs", 4.0)]),
                panel("writes", &[("theirs", 0.028), ("ours", 0.014)]),
                panel("nothing", &[("ours", 0.0)]),
            ],
        }
        .render();
        for text in ["a &lt; b &amp; c", ">reads<", ">writes<", ">ours<", ">4.00<", ">0.028<"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        let lengths: Vec<&str> = svg
            .split(r#"width=""#)
            .skip(1)
            .filter(|rest| rest.contains("fill=") && rest.contains(r#"height="13""#))
            .filter_map(|rest| rest.split('"').next())
            .collect();
        assert_eq!(lengths[lengths.len() - 5..], ["60.0", "240.0", "240.0", "120.0", "0.0"]);
        // The second column, and the second row of panels.
        assert!(svg.contains(r#"x="492" y="78">writes<"#), "{svg}");
        assert!(svg.contains(r#"x="96" y="160">nothing<"#), "{svg}");
        let colours = |name: usize| svg.matches(COLOURS[name]).count();
        assert_eq!((colours(0), colours(1), colours(2)), (3, 2, 0), "a colour for each name");
        assert!(!svg.contains("NaN"));
    }
}
