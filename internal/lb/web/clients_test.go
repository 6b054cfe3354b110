package web

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"portal/internal/lb/config"
)

// greeter is a gRPC service without generated code.
var greeter = grpc.ServiceDesc{
	ServiceName: "test.Greeter", HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Hello", Handler: func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		in := &wrapperspb.StringValue{}
		if err := decode(in); err != nil {
			return nil, err
		}
		switch in.Value {
		case "fail":
			return nil, status.Error(codes.FailedPrecondition, "not today")
		case "wait":
			<-ctx.Done()
			return nil, ctx.Err()
		}
		grpc.SetTrailer(ctx, metadata.Pairs("x-trailer", "yes"))
		return wrapperspb.String("hello " + in.Value), nil
	}}},
	Streams: []grpc.StreamDesc{{StreamName: "Chat", ServerStreams: true, ClientStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
		for {
			in := &wrapperspb.StringValue{}
			if err := stream.RecvMsg(in); err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
			if err := stream.SendMsg(wrapperspb.String("echo " + in.Value)); err != nil {
				return err
			}
		}
	}}},
}

func TestGRPC(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	server.RegisterService(&greeter, nil)
	go server.Serve(l)
	t.Cleanup(server.Stop)
	cfg := pool(l.Addr().(*net.TCPAddr).AddrPort())
	cfg.Protocol = config.H2C
	s := start(t, cfg, withTLS)
	conn, err := grpc.NewClient(s.address.String(), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()

	out := &wrapperspb.StringValue{}
	var trailer metadata.MD
	if err := conn.Invoke(ctx, "/test.Greeter/Hello", wrapperspb.String("you"), out, grpc.Trailer(&trailer)); err != nil || out.Value != "hello you" || trailer.Get("x-trailer")[0] != "yes" {
		t.Fatal(out, trailer, err)
	}
	if err := conn.Invoke(ctx, "/test.Greeter/Hello", wrapperspb.String("fail"), out); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "not today") {
		t.Error(err)
	}
	short, stop := context.WithTimeout(ctx, 100*time.Millisecond)
	defer stop()
	if err := conn.Invoke(short, "/test.Greeter/Hello", wrapperspb.String("wait"), out); status.Code(err) != codes.DeadlineExceeded {
		t.Error(err)
	}
	// A stream both ways: each message must come through before the next is sent; then more than any window holds.
	stream, err := conn.NewStream(ctx, &greeter.Streams[0], "/test.Greeter/Chat")
	if err != nil {
		t.Fatal(err)
	}
	large := strings.Repeat("x", 300_000)
	for i := range 30 {
		text := fmt.Sprint(i)
		if i >= 10 {
			text = large
		}
		if err := stream.SendMsg(wrapperspb.String(text)); err != nil {
			t.Fatal(err)
		}
		if err := stream.RecvMsg(out); err != nil || out.Value != "echo "+text {
			t.Fatalf("message %d: %d bytes, %v", i, len(out.Value), err)
		}
	}
	stream.CloseSend()
	if err := stream.RecvMsg(out); err != io.EOF {
		t.Error(err)
	}
}

// Without an endpoint a gRPC client gets an error of gRPC.
func TestGRPCErrors(t *testing.T) {
	s := start(t, pool(), withTLS)
	conn, err := grpc.NewClient(s.address.String(), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err = conn.Invoke(ctx, "/test.Greeter/Hello", wrapperspb.String("you"), &wrapperspb.StringValue{})
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "there is no endpoint") {
		t.Error(err)
	}
}

func TestWebSocket(t *testing.T) {
	upgrader := websocket.Upgrader{}
	at := handler(t, func(w http.ResponseWriter, r *http.Request) {
		c, err := upgrader.Upgrade(w, r, nil)
		if err != nil {
			return
		}
		defer c.Close()
		for {
			kind, message, err := c.ReadMessage()
			if err != nil {
				return
			}
			if err := c.WriteMessage(kind, append([]byte("echo "), message...)); err != nil {
				return
			}
		}
	})
	for _, secure := range []bool{false, true} {
		s := start(t, pool(at), func(s *site, l *config.Listener) {
			if secure {
				withTLS(s, l)
			}
		})
		dialer := websocket.Dialer{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}}}
		c, _, err := dialer.Dial("ws"+strings.TrimPrefix(s.url("/chat"), "http"), nil)
		if err != nil {
			t.Fatal(err)
		}
		c.SetReadDeadline(time.Now().Add(patience))
		for _, text := range []string{"a", strings.Repeat("b", 200_000)} {
			if err := c.WriteMessage(websocket.TextMessage, []byte(text)); err != nil {
				t.Fatal(err)
			}
			if _, got, err := c.ReadMessage(); err != nil || string(got) != "echo "+text {
				t.Fatalf("%d bytes, %v", len(got), err)
			}
		}
		if s.server.Stats("test").Upgrades.Load() != 1 {
			t.Error("the upgrade is not counted")
		}
		c.Close()
	}
}

func TestCurl(t *testing.T) {
	s := start(t, pool(handler(t, func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, n)
	})), withTLS)
	for _, tc := range []struct{ args, want string }{
		{"--http1.0", "0 1.1"}, // a server answers with its own version
		{"--http1.1", "0 1.1"},
		{"--http2", "0 2"},
		{"--http1.1 --data-binary @-", "300000 1.1"},
		{"--http2 --data-binary @-", "300000 2"},
		{"--http1.1 -T - ", "300000 1.1"},
		{"--http2 -T -", "300000 2"},
		{"--http1.1 -H Expect:100-continue --data-binary @-", "300000 1.1"},
		{"-I --http1.1", "1.1"},
		{"-I --http2", "2"},
	} {
		args := append([]string{"-sk", "--max-time", "60", "-o", "-", "-w", " %{http_version}"}, strings.Fields(tc.args)...)
		cmd := exec.Command("curl", append(args, s.url("/"))...)
		cmd.Stdin = strings.NewReader(strings.Repeat("a", 300_000))
		out, err := cmd.CombinedOutput()
		got := string(out)
		if strings.Contains(tc.args, "-I") {
			got = strings.TrimSpace(got[strings.LastIndexByte(got, '\n'):])
		}
		if err != nil || got != tc.want {
			t.Errorf("curl %s: %q, %v; want %q", tc.args, out, err, tc.want)
		}
	}
}
