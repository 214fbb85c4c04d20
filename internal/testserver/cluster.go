package testserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

const (
	clusterSize = 3
	readyWithin = 60 * time.Second // elections on a busy machine are slow
)

// A Cluster is three listening servers in one JetStream cluster. Nodes are
// stopped and started one by one with their own methods. They do not advertise
// each other, so that a client can be kept on one node or behind a proxy.
type Cluster struct {
	Nodes []*Server
}

// RunCluster starts a cluster and returns when it has a meta leader and three
// current members. configure, which may be nil, changes the options of node i
// at every start. The caller has to close the cluster.
func RunCluster(configure func(i int, o *server.Options)) (*Cluster, error) {
	ports, err := freePorts(clusterSize)
	if err != nil {
		return nil, err
	}
	var routes []*url.URL
	for _, port := range ports {
		routes = append(routes, &url.URL{Scheme: "nats", Host: fmt.Sprintf("127.0.0.1:%d", port)})
	}
	c := &Cluster{}
	for i, port := range ports {
		node, err := Run(Options{Listen: true, Configure: func(o *server.Options) {
			o.ServerName = fmt.Sprintf("n%d", i)
			o.Routes = routes
			o.Cluster = server.ClusterOpts{
				Name: "paced", Host: "127.0.0.1", Port: port, NoAdvertise: true,
			}
			if configure != nil {
				configure(i, o)
			}
		}})
		if err != nil {
			c.Close()
			return nil, err
		}
		c.Nodes = append(c.Nodes, node)
	}
	if err := c.WaitReady(); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// NewCluster is [RunCluster] for tests: it fails the test on error, and closes
// the cluster when the test ends.
func NewCluster(t testing.TB, configure func(i int, o *server.Options)) *Cluster {
	t.Helper()
	c, err := RunCluster(configure)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// freePorts returns ports that were free a moment ago. Routes need theirs
// before the first server starts.
func freePorts(n int) ([]int, error) {
	var ports []int
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

// Close stops all nodes and removes their directories.
func (c *Cluster) Close() {
	for _, node := range c.Nodes {
		node.Close()
	}
}

// URL returns the addresses of all nodes, for nats.Connect.
func (c *Cluster) URL() string {
	var urls []string
	for _, node := range c.Nodes {
		urls = append(urls, node.ClientURL())
	}
	return strings.Join(urls, ",")
}

// WaitReady returns when one of the running nodes is the meta leader, when that
// leader sees all of them, and when all of them are current, also in the named
// streams of the default account.
func (c *Cluster) WaitReady(streams ...string) error {
	return poll(func() error {
		var running []*server.Server
		var leader *server.Server
		for _, node := range c.Nodes {
			if srv := node.Server(); srv != nil {
				running = append(running, srv)
				if srv.JetStreamIsLeader() {
					leader = srv
				}
			}
		}
		if leader == nil {
			return errors.New("testserver: cluster has no meta leader")
		}
		if n := len(leader.JetStreamClusterPeers()); n < len(running) {
			return fmt.Errorf("testserver: meta leader sees %d of %d nodes", n, len(running))
		}
		for _, srv := range running {
			if !srv.JetStreamIsCurrent() {
				return fmt.Errorf("testserver: node %s is not current", srv.Name())
			}
			for _, stream := range streams {
				if !srv.JetStreamIsStreamCurrent(server.DEFAULT_GLOBAL_ACCOUNT, stream) {
					return fmt.Errorf("testserver: stream %s is not current on node %s", stream, srv.Name())
				}
			}
		}
		return nil
	})
}

// StreamLeader waits for the stream to have a leader and returns that node. The
// stream is one of the default account.
func (c *Cluster) StreamLeader(t testing.TB, stream string) *Server {
	t.Helper()
	return c.leader(t, "stream "+stream, func(srv *server.Server) bool {
		return srv.JetStreamIsStreamLeader(server.DEFAULT_GLOBAL_ACCOUNT, stream)
	})
}

// ConsumerLeader waits for the consumer to have a leader and returns that node.
func (c *Cluster) ConsumerLeader(t testing.TB, stream, consumer string) *Server {
	t.Helper()
	return c.leader(t, "consumer "+consumer, func(srv *server.Server) bool {
		return srv.JetStreamIsConsumerLeader(server.DEFAULT_GLOBAL_ACCOUNT, stream, consumer)
	})
}

func (c *Cluster) leader(t testing.TB, what string, leads func(*server.Server) bool) *Server {
	t.Helper()
	var leader *Server
	err := poll(func() error {
		for _, node := range c.Nodes {
			if srv := node.Server(); srv != nil && leads(srv) {
				leader = node
				return nil
			}
		}
		return fmt.Errorf("testserver: %s has no leader", what)
	})
	if err != nil {
		t.Fatal(err)
	}
	return leader
}

// poll asks again and again, because the server tells nobody outside about its
// elections.
func poll(ready func() error) error {
	for deadline := time.Now().Add(readyWithin); ; time.Sleep(10 * time.Millisecond) {
		err := ready()
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// StepDownStream makes the leader of a stream step down, and returns when it
// has. The next leader may take a moment.
func StepDownStream(nc *nats.Conn, stream string) error {
	return stepDown(nc, fmt.Sprintf(server.JSApiStreamLeaderStepDownT, stream))
}

// StepDownConsumer makes the leader of a consumer step down, and returns when
// it has. The next leader may take a moment.
func StepDownConsumer(nc *nats.Conn, stream, consumer string) error {
	return stepDown(nc, fmt.Sprintf(server.JSApiConsumerLeaderStepDownT, stream, consumer))
}

func stepDown(nc *nats.Conn, subject string) error {
	m, err := nc.Request(subject, nil, 10*time.Second)
	if err != nil {
		return err
	}
	var r struct {
		Success bool             `json:"success"`
		Error   *server.ApiError `json:"error"`
	}
	if err := json.Unmarshal(m.Data, &r); err != nil {
		return err
	}
	if r.Error != nil {
		return r.Error
	}
	if !r.Success {
		return fmt.Errorf("testserver: %s: no success", subject)
	}
	return nil
}
