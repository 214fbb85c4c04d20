package faultproxy

import (
	"net"
	"net/url"
	"sync"
)

// A Proxy listens on loopback and passes each connection on to one server.
//
// The proxy does not rewrite INFO. A server that advertises cluster peers
// leads its clients around the proxy; start it with Cluster.NoAdvertise, or
// connect with nats.IgnoreDiscoveredServers.
type Proxy struct {
	Faults

	listener net.Listener
	target   string
	wg       sync.WaitGroup
}

// New returns a running proxy in front of target, given as host:port or as a
// URL such as nats://127.0.0.1:4222. The caller has to close it.
func New(target string) (*Proxy, error) { return start(&Proxy{}, target) }

// NewRaw is New with [Faults.Raw] set: bytes only, no frames.
func NewRaw(target string) (*Proxy, error) {
	return start(&Proxy{Faults: Faults{Raw: true}}, target)
}

func start(p *Proxy, target string) (*Proxy, error) {
	if u, err := url.Parse(target); err == nil && u.Host != "" {
		target = u.Host
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p.listener, p.target = l, target
	p.wg.Go(p.accept)
	return p, nil
}

// Addr returns the host:port on which the proxy listens.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// URL returns the address for clients.
func (p *Proxy) URL() string { return "nats://" + p.Addr() }

// Close closes the listener and all connections.
func (p *Proxy) Close() {
	p.set(func() { p.closed = true })
	p.listener.Close()
	p.Disconnect()
	p.wg.Wait()
}

func (p *Proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		err = p.join(c, false, func() (net.Conn, error) { return net.Dial("tcp", p.target) })
		if err != nil {
			// A reset rather than an orderly end, like a dead server.
			c.(*net.TCPConn).SetLinger(0)
			c.Close()
		}
	}
}
