package alluvium.apps;

import java.util.Arrays;
import java.util.Locale;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.KTable;
import org.apache.kafka.streams.kstream.Produced;

/** Counts words, and words by chapter title, which comes from another topic: {@code WordCount BOOTSTRAP STATE_DIRECTORY}. */
public final class WordCount {
    /** The prefix of its transactional IDs. */
    static final String ID = "word-count";

    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, ID);
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, args[0]);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, args[1]);
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.REPLICATION_FACTOR_CONFIG, 1);
        settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, 100);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 2);
        // Each step of each count is in the output, so that a missing or repeated step is visible.
        settings.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, 0);
        settings.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        settings.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        settings.put(StreamsConfig.consumerPrefix("session.timeout.ms"), 10_000);
        settings.put(StreamsConfig.consumerPrefix("auto.offset.reset"), "earliest");

        StreamsBuilder builder = new StreamsBuilder();
        KTable<String, String> titles = builder.table("titles");
        var words = builder.<String, String>stream("text").flatMapValues(WordCount::words);
        words.groupBy((chapter, word) -> word, Grouped.with(Serdes.String(), Serdes.String())).count()
            .toStream().to("counts", Produced.with(Serdes.String(), Serdes.Long()));
        words.join(titles, (word, title) -> title + " " + word)
            .groupBy((chapter, titled) -> titled, Grouped.with(Serdes.String(), Serdes.String())).count()
            .toStream().to("counts-by-title", Produced.with(Serdes.String(), Serdes.Long()));

        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        Runtime.getRuntime().addShutdownHook(new Thread(streams::close));
        streams.start();
        Thread.currentThread().join();
    }

    static Iterable<String> words(String line) {
        return Arrays.stream(line.toLowerCase(Locale.ROOT).split("\\W+")).filter(word -> !word.isEmpty()).toList();
    }

    private WordCount() {
    }
}
