package alluvium.flink;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Comparator;
import java.util.Optional;
import java.util.stream.Stream;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.serialization.SimpleStringSchema;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.sink.TransactionNamingStrategy;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * The job: copies one topic to another exactly once, in a cluster inside this process, from the last checkpoint of an earlier process.
 * {@code BOOTSTRAP=... Copy FROM TO CHECKPOINTS STRATEGY}
 */
public final class Copy {
    public static void main(String[] args) throws Exception {
        String bootstrap = System.getenv("BOOTSTRAP");
        Path checkpoints = Path.of(args[2]);
        Configuration settings = new Configuration();
        settings.setString("parallelism.default", "2");
        settings.setString("taskmanager.numberOfTaskSlots", "2");
        settings.setString("execution.checkpointing.interval", "500ms");
        settings.setString("execution.checkpointing.dir", checkpoints.toUri().toString());
        settings.setString("execution.checkpointing.externalized-checkpoint-retention", "RETAIN_ON_CANCELLATION");
        settings.setString("execution.checkpointing.num-retained", "3");
        // An unavailable server fails the job, or a checkpoint. The job resumes from the last one, in this process.
        settings.setString("execution.checkpointing.tolerable-failed-checkpoints", "1000");
        settings.setString("restart-strategy.type", "fixed-delay");
        settings.setString("restart-strategy.fixed-delay.attempts", "1000");
        settings.setString("restart-strategy.fixed-delay.delay", "500ms");
        Optional<Path> last = last(checkpoints);
        last.ifPresent(path -> settings.setString("execution.state-recovery.path", path.toUri().toString()));
        System.err.println("resuming from " + last.map(Path::toString).orElse("the beginning"));

        StreamExecutionEnvironment flink = StreamExecutionEnvironment.createLocalEnvironment(settings);
        KafkaSource<String> source = KafkaSource.<String>builder()
            .setBootstrapServers(bootstrap)
            .setTopics(args[0])
            .setGroupId(args[0] + "-copy")
            .setStartingOffsets(OffsetsInitializer.earliest())
            .setValueOnlyDeserializer(new SimpleStringSchema())
            .build();
        KafkaSink<String> sink = KafkaSink.<String>builder()
            .setBootstrapServers(bootstrap)
            .setDeliveryGuarantee(DeliveryGuarantee.EXACTLY_ONCE)
            .setTransactionalIdPrefix(args[1])
            .setTransactionNamingStrategy(TransactionNamingStrategy.valueOf(args[3]))
            // Longer than any outage here; less than the servers' maximum.
            .setProperty("transaction.timeout.ms", "600000")
            .setRecordSerializer(KafkaRecordSerializationSchema.builder()
                .setTopic(args[1])
                .setValueSerializationSchema(new SimpleStringSchema())
                .build())
            .build();
        flink.fromSource(source, WatermarkStrategy.noWatermarks(), "source").uid("source").sinkTo(sink).uid("sink");
        flink.execute("copy");
    }

    /** The newest complete checkpoint. */
    private static Optional<Path> last(Path checkpoints) throws IOException {
        if (!Files.isDirectory(checkpoints)) {
            return Optional.empty();
        }
        try (Stream<Path> files = Files.walk(checkpoints)) {
            return files.filter(file -> file.endsWith("_metadata"))
                .max(Comparator.comparingLong(file -> file.toFile().lastModified())).map(Path::getParent);
        }
    }

    private Copy() {
    }
}
