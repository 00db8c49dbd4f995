package alluvium.spring;

import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.kafka.annotation.DltHandler;
import org.springframework.kafka.annotation.EnableKafka;
import org.springframework.kafka.annotation.EnableKafkaRetryTopic;
import org.springframework.kafka.annotation.KafkaListener;
import org.springframework.kafka.annotation.RetryableTopic;
import org.springframework.kafka.config.ConcurrentKafkaListenerContainerFactory;
import org.springframework.kafka.config.TopicBuilder;
import org.springframework.kafka.core.ConsumerFactory;
import org.springframework.kafka.core.DefaultKafkaConsumerFactory;
import org.springframework.kafka.core.DefaultKafkaProducerFactory;
import org.springframework.kafka.core.KafkaAdmin;
import org.springframework.kafka.core.KafkaTemplate;
import org.springframework.kafka.core.ProducerFactory;
import org.springframework.kafka.listener.ConcurrentMessageListenerContainer;
import org.springframework.kafka.listener.DeadLetterPublishingRecoverer;
import org.springframework.kafka.listener.DefaultAfterRollbackProcessor;
import org.springframework.kafka.listener.DefaultErrorHandler;
import org.springframework.kafka.requestreply.ReplyingKafkaTemplate;
import org.springframework.kafka.support.Acknowledgment;
import org.springframework.kafka.listener.ContainerProperties.AckMode;
import org.springframework.kafka.transaction.KafkaTransactionManager;
import org.springframework.messaging.handler.annotation.SendTo;
import org.springframework.scheduling.TaskScheduler;
import org.springframework.scheduling.concurrent.ThreadPoolTaskScheduler;
import org.springframework.util.backoff.FixedBackOff;

/** An application that uses the features of Spring Kafka around listeners: transactions, retries, dead letters, batches, replies. */
@Configuration
@EnableKafka
@EnableKafkaRetryTopic
public class Application {
    private static final String BOOTSTRAP = System.getenv("BOOTSTRAP");

    /** The records that listeners received, by the listener's name. */
    static final Map<String, BlockingQueue<String>> SEEN = new ConcurrentHashMap<>();
    static final AtomicInteger ROLLBACKS = new AtomicInteger();

    static BlockingQueue<String> seen(String listener) {
        return SEEN.computeIfAbsent(listener, name -> new LinkedBlockingQueue<>());
    }

    static Map<String, Object> consumer() {
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", BOOTSTRAP);
        settings.put("key.deserializer", StringDeserializer.class);
        settings.put("value.deserializer", StringDeserializer.class);
        settings.put("auto.offset.reset", "earliest");
        settings.put("isolation.level", "read_committed");
        return settings;
    }

    private static Map<String, Object> producer() {
        return Map.of("bootstrap.servers", BOOTSTRAP, "key.serializer", StringSerializer.class, "value.serializer", StringSerializer.class,
            "compression.type", "zstd");
    }

    @Bean
    KafkaAdmin admin() {
        return new KafkaAdmin(Map.of("bootstrap.servers", BOOTSTRAP));
    }

    @Bean
    KafkaAdmin.NewTopics topics() {
        return new KafkaAdmin.NewTopics(List.of("once-in", "once-out", "letters", "letters-dlt", "batches", "manual", "requests", "replies", "mail")
            .stream().map(name -> TopicBuilder.name(name).partitions(3).replicas(1).build()).toArray(NewTopic[]::new));
    }

    @Bean
    ProducerFactory<String, String> producerFactory() {
        return new DefaultKafkaProducerFactory<>(producer());
    }

    @Bean
    KafkaTemplate<String, String> template() {
        return new KafkaTemplate<>(producerFactory());
    }

    @Bean
    DefaultKafkaProducerFactory<String, String> transactionalFactory() {
        DefaultKafkaProducerFactory<String, String> factory = new DefaultKafkaProducerFactory<>(producer());
        factory.setTransactionIdPrefix("spring-");
        return factory;
    }

    @Bean
    KafkaTemplate<String, String> transactional() {
        return new KafkaTemplate<>(transactionalFactory());
    }

    @Bean
    ConsumerFactory<String, String> consumerFactory() {
        return new DefaultKafkaConsumerFactory<>(consumer());
    }

    private ConcurrentKafkaListenerContainerFactory<String, String> factory() {
        ConcurrentKafkaListenerContainerFactory<String, String> factory = new ConcurrentKafkaListenerContainerFactory<>();
        factory.setConsumerFactory(consumerFactory());
        return factory;
    }

    /** A failed record is retried twice, then it becomes a dead letter. */
    @Bean
    ConcurrentKafkaListenerContainerFactory<String, String> kafkaListenerContainerFactory() {
        ConcurrentKafkaListenerContainerFactory<String, String> factory = factory();
        factory.setCommonErrorHandler(new DefaultErrorHandler(new DeadLetterPublishingRecoverer(template()), new FixedBackOff(20, 2)));
        factory.setReplyTemplate(template());
        return factory;
    }

    @Bean
    ConcurrentKafkaListenerContainerFactory<String, String> onceFactory() {
        ConcurrentKafkaListenerContainerFactory<String, String> factory = factory();
        factory.setConcurrency(3);
        factory.getContainerProperties().setKafkaAwareTransactionManager(new KafkaTransactionManager<>(transactionalFactory()));
        factory.setAfterRollbackProcessor(new DefaultAfterRollbackProcessor<>(new FixedBackOff(20, 5)));
        return factory;
    }

    @Bean
    ConcurrentKafkaListenerContainerFactory<String, String> batchFactory() {
        ConcurrentKafkaListenerContainerFactory<String, String> factory = factory();
        factory.setBatchListener(true);
        factory.setConcurrency(2);
        return factory;
    }

    @Bean
    ConcurrentKafkaListenerContainerFactory<String, String> manualFactory() {
        ConcurrentKafkaListenerContainerFactory<String, String> factory = factory();
        factory.getContainerProperties().setAckMode(AckMode.MANUAL_IMMEDIATE);
        return factory;
    }

    @Bean
    ReplyingKafkaTemplate<String, String, String> replying() {
        ConcurrentMessageListenerContainer<String, String> replies = factory().createContainer("replies");
        replies.getContainerProperties().setGroupId("replies");
        return new ReplyingKafkaTemplate<>(producerFactory(), replies);
    }

    @Bean
    TaskScheduler scheduler() {
        return new ThreadPoolTaskScheduler();
    }

    /** Each third record fails at its first delivery, after it was forwarded, so the forwarding is rolled back. */
    @KafkaListener(id = "once", topics = "once-in", containerFactory = "onceFactory")
    void once(String value) {
        transactional().send("once-out", value);
        if (Integer.parseInt(value) % 3 == 0 && !seen("once").contains(value)) {
            seen("once").add(value);
            ROLLBACKS.incrementAndGet();
            throw new IllegalStateException("the first time");
        }
    }

    @KafkaListener(id = "letters", topics = "letters")
    void letters(String value) {
        seen("letters").add(value);
        if (value.startsWith("bad")) {
            throw new IllegalStateException("always");
        }
    }

    @KafkaListener(id = "dead-letters", topics = "letters-dlt")
    void deadLetters(ConsumerRecord<String, String> record) {
        String from = new String(record.headers().lastHeader("kafka_dlt-original-topic").value());
        seen("dead-letters").add(record.value() + " of " + from);
    }

    /** A failed record goes through retry topics, so that other records do not wait. */
    @RetryableTopic(attempts = "3", backOff = @org.springframework.kafka.annotation.BackOff(delay = 100), kafkaTemplate = "template", numPartitions = "3")
    @KafkaListener(id = "mail", topics = "mail")
    void mail(ConsumerRecord<String, String> record) {
        seen("mail").add(record.value() + " of " + record.topic());
        if (record.value().startsWith("bad")) {
            throw new IllegalStateException("always");
        }
    }

    @DltHandler
    void deadMail(ConsumerRecord<String, String> record) {
        seen("dead-mail").add(record.value() + " of " + record.topic());
    }

    @KafkaListener(id = "batches", topics = "batches", containerFactory = "batchFactory")
    void batches(List<String> values) {
        seen("batches").addAll(values);
    }

    /** A record that is not acknowledged is delivered again. */
    @KafkaListener(id = "manual", topics = "manual", containerFactory = "manualFactory")
    void manual(String value, Acknowledgment acknowledgment) {
        boolean first = !seen("manual").contains(value);
        seen("manual").add(value);
        if (first) {
            acknowledgment.nack(java.time.Duration.ofMillis(20));
        } else {
            acknowledgment.acknowledge();
        }
    }

    @KafkaListener(id = "requests", topics = "requests")
    @SendTo
    String requests(String value) {
        return value.toUpperCase();
    }
}
