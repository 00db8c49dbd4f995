//! Line charts and bars as SVG, readable on light and dark pages: the picture brings its own
//! background and follows the reader's preference.
#![forbid(unsafe_code)]

mod bars;

use std::fmt::Write as _;

pub use bars::{Bar, Bars, Panel};

/// A chart with one x axis, one y axis and a legend.
pub struct Chart {
    /// In large letters.
    pub title: String,
    /// Under the title: what was measured, and where.
    pub subtitle: String,
    /// To the right.
    pub x: Axis,
    /// Upwards.
    pub y: Axis,
    /// At most eight, so that they are distinguishable.
    pub series: Vec<Series>,
    /// Positions on the x axis, and labels of the events there.
    pub marks: Vec<(f64, String)>,
}

/// An axis; the label names its unit.
pub struct Axis {
    /// What it shows, in which unit.
    pub label: String,
    /// How it is divided.
    pub scale: Scale,
}

/// How values become positions.
pub enum Scale {
    /// From zero.
    Linear,
    /// For positive values that span decades.
    Logarithmic,
    /// Value `n` is the `n`th name.
    Names(Vec<String>),
}

/// A line with a marker at each point.
pub struct Series {
    /// In the legend.
    pub name: String,
    /// From left to right.
    pub points: Vec<(f64, f64)>,
    /// For what was not measured here.
    pub dashed: bool,
}

/// Points with a marker each, in a series.
const MOST_MARKERS: usize = 40;
const WIDTH: f64 = 840.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 72.0;
const TOP: f64 = 64.0;
const PLOT_WIDTH: f64 = 540.0;
const PLOT_HEIGHT: f64 = 330.0;
const LEGEND: f64 = LEFT + PLOT_WIDTH + 20.0;

/// Distinguishable with colour blindness too (after Okabe and Ito), and bright enough on white and
/// on black.
const COLOURS: [&str; 8] =
    ["#2f81c7", "#e07b00", "#149b72", "#c8588f", "#8a63d2", "#a08a00", "#d1493f", "#6e7781"];

/// Where an axis begins and ends, and where it has marks.
struct Range {
    first: f64,
    last: f64,
    ticks: Vec<(f64, String)>,
}

impl Axis {
    fn range(&self, values: impl Iterator<Item = f64> + Clone) -> Range {
        let least = values.clone().fold(f64::INFINITY, f64::min);
        let most = values.fold(f64::NEG_INFINITY, f64::max);
        match &self.scale {
            Scale::Names(names) => Range {
                first: -0.5,
                last: names.len() as f64 - 0.5,
                ticks: names.iter().enumerate().map(|(n, name)| (n as f64, name.clone())).collect(),
            },
            Scale::Linear => {
                let step = step(most.max(f64::MIN_POSITIVE));
                let count = (most / step).ceil().max(1.0);
                let tick = |n| (f64::from(n) * step, number(f64::from(n) * step));
                Range {
                    first: 0.0,
                    last: count * step,
                    ticks: (0..=count as u32).map(tick).collect(),
                }
            }
            Scale::Logarithmic => {
                // 1, 2 and 5 times the powers of ten, from the one below the least to the one above
                // the most.
                let marks: Vec<f64> = (-9..=12)
                    .flat_map(|exponent| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(exponent)))
                    .collect();
                let below = marks.iter().rposition(|mark| *mark <= least).unwrap_or(0);
                let above = marks.iter().position(|mark| *mark >= most).unwrap_or(marks.len() - 1);
                let marks = &marks[below..=above.max(below + 1)];
                Range {
                    first: marks[0].log10(),
                    last: marks[marks.len() - 1].log10(),
                    ticks: marks.iter().map(|mark| (mark.log10(), number(*mark))).collect(),
                }
            }
        }
    }

    fn position(&self, value: f64) -> f64 {
        if let Scale::Logarithmic = self.scale { value.log10() } else { value }
    }
}

/// Returns the opening tag of a picture of this height.
fn opening_tag(height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" role=\"img\">"
    )
}

/// A round number of which five to ten fit into `most`.
fn step(most: f64) -> f64 {
    let power = 10_f64.powf((most / 5.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
    steps.into_iter().rev().find(|step| *step <= most / 5.0 * 1.0001).unwrap_or(power)
}

/// Without needless decimals, thousands apart.
fn number(value: f64) -> String {
    if value >= 1000.0 {
        let digits = format!("{value:.0}");
        let mut text = String::new();
        for (n, digit) in digits.chars().enumerate() {
            if n > 0 && (digits.len() - n).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        return text;
    }
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

impl Chart {
    /// The file's content.
    pub fn render(&self) -> String {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let x = self.x.range(points().map(|point| point.0));
        let y = self.y.range(points().map(|point| point.1));
        let share =
            |range: &Range, position: f64| (position - range.first) / (range.last - range.first);
        let at_x = |position: f64| LEFT + share(&x, position) * PLOT_WIDTH;
        let at_y = |position: f64| TOP + (1.0 - share(&y, position)) * PLOT_HEIGHT;

        let mut svg = String::new();
        let mut line =
            |text: std::fmt::Arguments<'_>| writeln!(svg, "{text}").expect("a string takes all");
        line(format_args!("{}", opening_tag(HEIGHT)));
        line(format_args!("<title>{}</title>", escape(&self.title)));
        line(format_args!("{STYLE}"));
        line(format_args!(r#"<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="6"/>"#));
        line(format_args!(
            r#"<text class="title" x="{LEFT}" y="26">{}</text>"#,
            escape(&self.title)
        ));
        line(format_args!(
            r#"<text class="note" x="{LEFT}" y="45">{}</text>"#,
            escape(&self.subtitle)
        ));

        let (right, bottom) = (LEFT + PLOT_WIDTH, TOP + PLOT_HEIGHT);
        for (position, text) in &y.ticks {
            let at = at_y(*position);
            line(format_args!(r#"<path class="grid" d="M{LEFT} {at:.1}H{right}"/>"#));
            let (x, y) = (LEFT - 8.0, at + 4.0);
            line(format_args!(r#"<text class="end" x="{x}" y="{y:.1}">{}</text>"#, escape(text)));
        }
        for (position, text) in &x.ticks {
            let at = at_x(*position);
            line(format_args!(r#"<path class="axis" d="M{at:.1} {bottom}v5"/>"#));
            let y = bottom + 20.0;
            line(format_args!(
                r#"<text class="middle" x="{at:.1}" y="{y}">{}</text>"#,
                escape(text)
            ));
        }
        line(format_args!(r#"<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>"#));
        let (middle, below) = (LEFT + PLOT_WIDTH / 2.0, bottom + 44.0);
        line(format_args!(
            r#"<text class="middle" x="{middle}" y="{below}">{}</text>"#,
            escape(&self.x.label)
        ));
        let half = TOP + PLOT_HEIGHT / 2.0;
        line(format_args!(
            r#"<text class="middle" transform="translate(20 {half}) rotate(-90)">{}</text>"#,
            escape(&self.y.label)
        ));

        for (position, text) in &self.marks {
            let at = at_x(self.x.position(*position));
            line(format_args!(r#"<path class="mark" d="M{at:.1} {TOP}V{bottom}"/>"#));
            let (x, y) = (at + 5.0, TOP + 12.0);
            line(format_args!(r#"<text class="note" x="{x:.1}" y="{y}">{}</text>"#, escape(text)));
        }

        for (n, series) in self.series.iter().enumerate() {
            let colour = COLOURS[n % COLOURS.len()];
            let dash = if series.dashed { r#" stroke-dasharray="7 5""# } else { "" };
            let positions: Vec<(f64, f64)> = series
                .points
                .iter()
                .map(|(x, y)| (at_x(self.x.position(*x)), at_y(self.y.position(*y))))
                .collect();
            let path: Vec<String> =
                positions.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            line(format_args!(
                r#"<polyline class="line" stroke="{colour}"{dash} points="{}"/>"#,
                path.join(" ")
            ));
            // So many would be a thick line.
            if positions.len() <= MOST_MARKERS {
                for (x, y) in positions {
                    line(format_args!("{}", marker(n, x, y, colour)));
                }
            }
            let y = TOP + 10.0 + 24.0 * n as f64;
            line(format_args!(
                r#"<path class="line" stroke="{colour}"{dash} d="M{LEGEND} {y}h28"/>{}"#,
                marker(n, LEGEND + 14.0, y, colour)
            ));
            let (x, y) = (LEGEND + 36.0, y + 4.0);
            line(format_args!(r#"<text x="{x}" y="{y}">{}</text>"#, escape(&series.name)));
        }
        line(format_args!("</svg>"));
        svg
    }
}

/// A disc, a square, a diamond or a triangle.
fn marker(series: usize, x: f64, y: f64, colour: &str) -> String {
    match series % 4 {
        0 => format!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="4" fill="{colour}"/>"#),
        1 => format!(
            r#"<rect x="{:.1}" y="{:.1}" width="7.6" height="7.6" fill="{colour}"/>"#,
            x - 3.8,
            y - 3.8
        ),
        2 => format!(r#"<path d="M{x:.1} {:.1}l5 5l-5 5l-5-5z" fill="{colour}"/>"#, y - 5.0),
        _ => format!(r#"<path d="M{x:.1} {:.1}l5 9h-10z" fill="{colour}"/>"#, y - 5.5),
    }
}

const STYLE: &str = "<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 }
.heading { font-weight: 600 }
.note { font-size: 12px; fill: #59636e }
.end { text-anchor: end }
.middle { text-anchor: middle }
.page { fill: #ffffff }
.grid { stroke: #d1d9e0; fill: none }
.axis { stroke: #59636e; fill: none }
.line { stroke-width: 2; fill: none }
.mark { stroke: #59636e; stroke-opacity: 0.6; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .note { fill: #9198a1 }
  .page { fill: #0d1117 }
  .grid { stroke: #2f353d }
  .axis, .mark { stroke: #9198a1 }
}
</style>";

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(scale: Scale) -> Axis {
        Axis { label: "latency in ms".into(), scale }
    }

    fn ticks(scale: Scale, values: &[f64]) -> Vec<String> {
        let range = axis(scale).range(values.iter().copied());
        let inside = |value: &f64| {
            let position =
                if range.first < 0.0 || range.last < 5.0 { value.log10() } else { *value };
            (range.first..=range.last).contains(&position)
        };
        assert!(values.iter().all(inside), "{values:?} in {}..{}", range.first, range.last);
        range.ticks.into_iter().map(|tick| tick.1).collect()
    }

    #[test]
    fn linear_axes_begin_at_zero_and_end_above_the_most() {
        assert_eq!(
            ticks(Scale::Linear, &[12.0, 120.0]),
            ["0", "20", "40", "60", "80", "100", "120"]
        );
        assert_eq!(
            ticks(Scale::Linear, &[3417.0]),
            ["0", "500", "1,000", "1,500", "2,000", "2,500", "3,000", "3,500"]
        );
        let range = axis(Scale::Linear).range([0.7].into_iter());
        assert_eq!((range.first, range.ticks.len()), (0.0, 8));
        assert_eq!(range.ticks[7].1, "0.7");
    }

    #[test]
    fn logarithmic_axes_have_marks_at_one_two_and_five() {
        assert_eq!(ticks(Scale::Logarithmic, &[0.52, 7.1]), ["0.5", "1", "2", "5", "10"]);
        assert_eq!(ticks(Scale::Logarithmic, &[1.0]), ["1", "2"], "a single value has a range too");
    }

    #[test]
    fn a_chart_shows_each_point_name_and_label_within_its_frame() {
        let chart = Chart {
            title: "a < b & c".into(),
            subtitle: "here".into(),
            x: Axis {
                label: "record".into(),
                scale: Scale::Names(vec!["1KiB".into(), "1MiB".into()]),
            },
            y: axis(Scale::Linear),
            series: vec![
                Series {
                    name: "measured".into(),
                    points: vec![(0.0, 0.0), (1.0, 10.0)],
                    dashed: false,
                },
                Series { name: "published".into(), points: vec![(0.0, 5.0)], dashed: true },
            ],
            marks: vec![(0.5, "half".into())],
        };
        let svg = chart.render();
        for text in [
            "a &lt; b &amp; c",
            ">here<",
            ">1KiB<",
            ">1MiB<",
            ">record<",
            ">latency in ms<",
            ">measured<",
            ">published<",
        ] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert!(svg.contains(r#"class="mark" d="M342.0 "#) && svg.contains(">half<"), "{svg}");
        // A quarter into the frame at the bottom, three quarters into it at the top.
        assert!(svg.contains(r#"points="207.0,394.0 477.0,64.0""#), "{svg}");
        assert_eq!(svg.matches("stroke-dasharray").count(), 2, "the line and its legend");
        assert_eq!(svg.matches("<circle").count(), 3, "two points and the legend");
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
