package talostest

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	machineapi "github.com/siderolabs/talos/pkg/machinery/api/machine"
	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/utils/clock"
)

// Options configures a Cluster. The zero value is valid.
type Options struct {
	// Name is the cluster's name; "talostest" by default.
	Name string
	// Clock is used to issue and verify certificates, and for nothing else; the system clock by default.
	Clock clock.PassiveClock
	// Dir is the parent of the directory for machine.sock files, which Close removes; by default that for temporary files. Socket paths
	// must be shorter than 108 bytes.
	Dir string
	// PodCIDRs defaults to that of Talos, 10.244.0.0/16.
	PodCIDRs []netip.Prefix
}

func (o *Options) setDefaults() {
	if o.Name == "" {
		o.Name = "talostest"
	}

	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}

	if len(o.PodCIDRs) == 0 {
		o.PodCIDRs = []netip.Prefix{netip.MustParsePrefix(constants.DefaultIPv4PodCIDR)}
	}
}

// Cluster is a set of Talos machines that share a CA. Its methods are safe for concurrent use.
type Cluster struct {
	options Options
	id      string
	now     func() time.Time

	authority authority
	server    *grpc.Server
	calls     atomic.Uint64
	dir       string

	mu          sync.Mutex
	last        netip.Addr // the last assigned address
	machines    map[string]*Machine
	etcdMembers []*machineapi.EtcdMember
}

// New returns a cluster without machines. Callers must call Close.
func New(options Options) (*Cluster, error) {
	options.setDefaults()

	c := &Cluster{
		options:   options,
		id:        rand.Text(),
		now:       options.Clock.Now,
		authority: authority{now: options.Clock.Now},
		server:    newServer(),
		last:      randomAddress(),
		machines:  make(map[string]*Machine),
	}

	if err := c.authority.rotate(DropOldCA); err != nil {
		return nil, err
	}

	var err error
	if c.dir, err = os.MkdirTemp(options.Dir, "talostest"); err != nil {
		return nil, fmt.Errorf("create directory for sockets: %w", err)
	}

	return c, nil
}

// randomAddress returns an address outside of 127.0.0.0/12, which hosts use for their own services. Clusters start with different addresses,
// so that a client that still dials a machine of another cluster rarely reaches one of this cluster.
func randomAddress() netip.Addr {
	random := make([]byte, 3)
	_, _ = rand.Read(random) // never fails (crypto/rand)

	return netip.AddrFrom4([4]byte{127, 16 + random[0]%128, random[1], random[2]})
}

// newServer returns the gRPC server that all machines share. Its limits are those of Talos; its buffers are small to allow thousands of
// machines.
func newServer() *grpc.Server {
	const bufferSize = 4 << 10

	server := grpc.NewServer(
		grpc.Creds(handshake{insecure.NewCredentials()}),
		grpc.MaxRecvMsgSize(constants.GRPCMaxMessageSize),
		grpc.ReadBufferSize(bufferSize),
		grpc.WriteBufferSize(bufferSize),
		grpc.UnaryInterceptor(interceptUnary),
		grpc.StreamInterceptor(interceptStream),
	)
	v1alpha1.RegisterStateServer(server, resourceService{})
	machineapi.RegisterMachineServiceServer(server, machineService{})

	return server
}

// Close stops all machines and releases their addresses. Further calls do nothing.
func (c *Cluster) Close() {
	for _, machine := range c.Machines() {
		machine.close()
	}

	c.server.Stop()
	_ = os.RemoveAll(c.dir)
}

// SetEtcdMembers sets the addresses of the members of etcd, which all control-plane machines report. Without members, as
// initially, etcd has no leader.
func (c *Cluster) SetEtcdMembers(addresses ...netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.etcdMembers = nil

	for _, addr := range addresses {
		peer := "https://" + netip.AddrPortFrom(addr, constants.EtcdPeerPort).String()
		c.etcdMembers = append(c.etcdMembers, &machineapi.EtcdMember{PeerUrls: []string{peer}})
	}
}

func (c *Cluster) listEtcdMembers() []*machineapi.EtcdMember {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.etcdMembers
}

// AddMachine adds a machine that has booted and serves its API.
func (c *Cluster) AddMachine(spec MachineSpec) (*Machine, error) {
	machine, err := c.addMachine(spec)
	if err != nil {
		return nil, fmt.Errorf("add machine %q: %w", spec.Nodename, err)
	}

	return machine, nil
}

func (c *Cluster) addMachine(spec MachineSpec) (*Machine, error) {
	if spec.Nodename == "" {
		return nil, errors.New("nodename is required")
	}

	listener, err := c.bind(&spec)
	if err != nil {
		return nil, err
	}

	spec.setDefaults()

	m := &Machine{cluster: c, spec: spec, memory: newBoot(spec.UnsupportedTypes)}
	m.api = newLink(m, TransportAPID, listener)
	m.BreakStreams()
	m.RenewCertificate()
	m.SetKubeletCertificate(spec.KubeletCertificate)

	if err := c.bootMachine(m, spec); err != nil {
		m.close()

		return nil, err
	}

	return m, nil
}

// bind listens on the machine's address. If the spec has none, it sets the next free address.
func (c *Cluster) bind(spec *MachineSpec) (net.Listener, error) {
	if spec.Listen != nil {
		return spec.Listen(context.Background(), apidOf(spec.Address))
	}

	if spec.Address.IsValid() {
		return listenAPI(spec.Address)
	}

	c.mu.Lock()
	defer c.mu.Unlock()

	for {
		c.last = c.last.Next()

		listener, err := listenAPI(c.last)
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}

		spec.Address = c.last

		return listener, err
	}
}

func listenAPI(addr netip.Addr) (net.Listener, error) {
	var config net.ListenConfig
	config.SetMultipathTCP(false) // its sockets have no filters

	return config.Listen(context.Background(), "tcp", apidOf(addr))
}

func apidOf(addr netip.Addr) string { return netip.AddrPortFrom(addr, constants.ApidPort).String() }

func (c *Cluster) bootMachine(m *Machine, spec MachineSpec) error {
	for _, res := range c.seed(spec) {
		if err := m.State().Create(context.Background(), res); err != nil { // in memory
			return fmt.Errorf("publish %s: %w", res.Metadata(), err)
		}
	}

	if spec.ServeSocket {
		listener, err := net.Listen("unix", m.Socket())
		if err != nil {
			return fmt.Errorf("listen on machine.sock: %w", err)
		}

		m.socket = newLink(m, TransportSocket, listener)
	}

	return c.admit(m)
}

// admit adds the machine to the cluster and starts to accept connections.
func (c *Cluster) admit(m *Machine) error {
	c.mu.Lock()
	defer c.mu.Unlock()

	if _, exists := c.machines[m.spec.Nodename]; exists {
		return errors.New("a machine with this nodename exists")
	}

	c.machines[m.spec.Nodename] = m

	for _, l := range m.links() {
		go func() { _ = c.server.Serve(l) }()
	}

	return nil
}

// Machine returns the machine that was added with the given nodename, or nil.
func (c *Cluster) Machine(nodename string) *Machine {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.machines[nodename]
}

// Machines returns all machines, sorted by nodename.
func (c *Cluster) Machines() []*Machine {
	c.mu.Lock()
	defer c.mu.Unlock()

	return slices.SortedFunc(maps.Values(c.machines), func(a, b *Machine) int { return strings.Compare(a.spec.Nodename, b.spec.Nodename) })
}

// Name returns the cluster's name.
func (c *Cluster) Name() string { return c.options.Name }

// CA returns the PEM certificates of the accepted Talos CAs, the issuing one first.
func (c *Cluster) CA() []byte { return c.authority.acceptedPEM() }

// CallCount returns the number of RPCs that all machines have received.
func (c *Cluster) CallCount() uint64 { return c.calls.Load() }

// ClientTLS returns a client configuration with a certificate for the given roles, such as os:reader. It trusts the currently accepted CAs.
func (c *Cluster) ClientTLS(roles ...string) (*tls.Config, error) {
	parsed, _ := role.Parse(roles)

	crt, err := c.authority.clientCertificate(parsed, clientCertificateValidity)
	if err != nil {
		return nil, err
	}

	pair, err := tls.X509KeyPair(crt.Crt, crt.Key)
	if err != nil {
		return nil, fmt.Errorf("load client certificate: %w", err)
	}

	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		RootCAs:      c.authority.pool(),
		Certificates: []tls.Certificate{pair},
		Time:         c.now,
	}, nil
}

// Talosconfig returns a client configuration like that of `talosctl config new --roles`, with the control-plane machines as endpoints.
func (c *Cluster) Talosconfig(roles ...string) (*clientconfig.Config, error) {
	parsed, _ := role.Parse(roles)

	crt, err := c.authority.clientCertificate(parsed, clientCertificateValidity)
	if err != nil {
		return nil, err
	}

	var endpoints []string

	for _, machine := range c.Machines() {
		if machine.spec.Type.IsControlPlane() {
			endpoints = append(endpoints, machine.spec.Address.String())
		}
	}

	return clientconfig.NewConfig(c.options.Name, endpoints, bytes.TrimSpace(c.CA()), crt), nil
}

// RotateCA replaces the Talos CA. All machines use certificates of the new CA for new connections; open connections stay.
func (c *Cluster) RotateCA(old OldCA) error { return c.authority.rotate(old) }
