// Java's HttpClient: ADDRESS KEY FILE; what it makes of a node, as JSON. See stock_http.py.

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.InputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.zip.GZIPOutputStream;

public class Stock {
    static final String ECHO = "/functions/f/invoke", STREAM = "/functions/s/invoke", VALUE = "{\"a\": [1, \"é\"]}";
    static final HttpClient CLIENT = HttpClient.newHttpClient();
    static String address, key;

    static void told(String name, int status, String text) {
        String quoted = text.replace("\\", "\\\\").replace("\"", "\\\"").replace("\n", "\\n");
        System.out.println("{\"" + name + "\": [" + status + ", \"" + quoted + "\"]}");
    }

    static HttpRequest request(String method, String path, BodyPublisher body, String... headers) {
        var made = HttpRequest.newBuilder(URI.create("http://" + address + path)).method(method, body);
        made.setHeader("Authorization", "Bearer " + key);
        for (int place = 0; place < headers.length; place += 2) made.setHeader(headers[place], headers[place + 1]);
        return made.build();
    }

    static void ask(String name, String method, String path, BodyPublisher body, String... headers) throws Exception {
        var answer = CLIENT.send(request(method, path, body, headers), BodyHandlers.ofString());
        told(name, answer.statusCode(), answer.body());
        if (!name.startsWith("after "))
            ask("after " + name, "POST", ECHO, BodyPublishers.ofString(VALUE), "Content-Type", "application/json");
    }

    public static void main(String[] given) throws Exception {
        address = given[0];
        key = given[1];
        byte[] large = new byte[20 << 20], more = new byte[40 << 20];
        Arrays.fill(large, (byte) 'a');
        var packed = new ByteArrayOutputStream();
        try (var packer = new GZIPOutputStream(packed)) {
            packer.write(VALUE.getBytes(StandardCharsets.UTF_8));
        }
        String kind = "Content-Type", json = "application/json", octets = "application/octet-stream";
        BodyPublisher whole = BodyPublishers.ofByteArray(large);
        String head = "--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.bin\"\r\n\r\n";
        BodyPublisher form = BodyPublishers.concat(
            BodyPublishers.ofString(head), whole, BodyPublishers.ofString("\r\n--x--\r\n"));
        ask("json", "POST", ECHO, BodyPublishers.ofString(VALUE), kind, json);
        ask("upload", "POST", ECHO, whole, kind, octets);
        ask("chunked", "POST", ECHO, BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(large)), kind, octets);
        ask("form", "POST", ECHO, form, kind, "multipart/form-data; boundary=x");
        ask("413", "POST", ECHO, BodyPublishers.ofByteArray(more), kind, octets);
        ask("404", "POST", "/functions/none/invoke", whole, kind, octets);
        ask("401", "POST", ECHO, whole, kind, octets, "Authorization", "Bearer dm_0_0");
        ask("415", "POST", ECHO, whole, kind, octets, "Content-Encoding", "br");
        ask("gzip", "POST", ECHO, BodyPublishers.ofByteArray(packed.toByteArray()), kind, json, "Content-Encoding", "gzip");
        ask("head", "HEAD", "/healthz", BodyPublishers.noBody());
        ask("slash", "POST", ECHO + "/", BodyPublishers.ofString(VALUE), kind, json);
        ask("empty", "POST", ECHO, BodyPublishers.ofString("\"nothing\""), kind, json);
        var streamed = request("POST", STREAM, BodyPublishers.ofString("\"" + given[2] + "\""), kind, json);
        try (InputStream parts = CLIENT.send(streamed, BodyHandlers.ofInputStream()).body()) {
            byte[] room = new byte[1024];
            told("first part", 200, new String(room, 0, parts.read(room), StandardCharsets.UTF_8));
            Files.createFile(Path.of(given[2]));
            told("rest", 200, new String(parts.readAllBytes(), StandardCharsets.UTF_8));
        }
    }
}
