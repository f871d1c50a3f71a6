package config

import (
	"bytes"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Compiled is a configuration that is ready for use. It is made by Parse, and never changed.
type Compiled struct {
	// ClusterName is empty if Talos's own is to be used.
	ClusterName string
	PreferIPv6  bool
	// ProviderIDFallback is empty if the flag decides.
	ProviderIDFallback ProviderIDFallback
	// Rules are never nil.
	Rules *rules.Set
	// Claim selects the machines whose Nodes are ours; nil: all.
	NodeSelector *rules.Selector
	// MaxExpiration is the longest lifetime of a kubelet's serving certificate.
	MaxExpiration time.Duration
	// AllowedSANs are in the order of the file.
	AllowedSANs []CompiledSANs
	// Pools are in the order of the file. If blocks are to follow the number of pods, a last one without CIDRs is for all Nodes that no other selects.
	Pools []CompiledPool

	// rules is the number of rules.
	rules int
}

// String is a summary of one line.
func (c *Compiled) String() string {
	sans := 0
	for _, entry := range c.AllowedSANs {
		sans += len(entry.DNSNames) + len(entry.IPAddresses)
	}

	return fmt.Sprintf("valid: %s, %s, %s", count(c.rules, "rule"), count(len(c.Pools), "pool"), count(sans, "allowed SAN"))
}

func count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}

	return fmt.Sprintf("%d %s", n, noun)
}

// CompiledSANs may be in the certificates of the machines that are selected.
type CompiledSANs struct {
	Name string
	// Selector is nil for all machines.
	Selector *rules.Selector
	// DNSNames are in lower case.
	DNSNames []string
	// IPAddresses are unmapped and without zone.
	IPAddresses []netip.Addr
}

// CompiledPool is where the selected Nodes get their pod CIDRs from.
type CompiledPool struct {
	Name string
	// Selector is nil for all machines.
	Selector *rules.Selector
	// CIDRs are masked, in the order of the file, and overlap no others of any pool.
	CIDRs []netip.Prefix
	// MaskSizeIPv4 and MaskSizeIPv6 are 0 where the file does not say any. A mask size fits all of the pool's CIDRs of its family. Of a family without CIDRs
	// it is for blocks from elsewhere.
	MaskSizeIPv4, MaskSizeIPv6 int
	// BlockSizeAuto makes an IPv4 block as large as the number of the Node's pods asks for. MaskSizeIPv4 is 0 then.
	BlockSizeAuto bool
}

// CheckNotEmpty fails if a file of that name has nothing in it: it is being written, or got lost when a disk was full. To take it for the defaults would
// claim every Node.
func CheckNotEmpty(name string, data []byte) error {
	if len(bytes.TrimSpace(data)) == 0 {
		return fmt.Errorf("%s is empty; {} stands for the defaults", name)
	}

	return nil
}

// Parse reads a file, YAML or JSON. Nothing at all gives the defaults, as where there is no file: see CheckNotEmpty. The error, an *Error, has all mistakes; name is for them alone.
func Parse(name string, data []byte) (*Compiled, error) {
	var (
		r    report
		file Config
	)

	if err := load(data, &r); err != nil {
		return nil, r.err(name)
	}

	decoder{&r}.decode(r.root, reflect.ValueOf(&file).Elem(), nil)
	compiled := compiler{&r}.compile(file)

	if err := r.err(name); err != nil {
		return nil, err
	}

	return compiled, nil
}

// compiler makes sense of what was decoded, and reports what makes none. Where the decoder had something to say already it adds nothing.
type compiler struct{ *report }

func (c compiler) refuse(p path, format string, args ...any) {
	if len(c.problems) < maxProblems && !c.involves(p) {
		c.at(p, format, args...)
	}
}

func (c compiler) refuseAll(p path, mistakes []rules.CompileError) {
	if len(mistakes) == 0 {
		return
	}

	// Two of them may be of the same place.
	before := report{paths: slices.Clone(c.paths)}

	for _, mistake := range mistakes {
		if at := p.with(mistake.Path...); len(c.problems) < maxProblems && !before.involves(at) {
			c.at(at, "%v", mistake.Err)
		}
	}
}

func (c compiler) compile(file Config) *Compiled {
	compiled := &Compiled{
		ClusterName:        file.Global.ClusterName,
		PreferIPv6:         file.Global.PreferIPv6,
		ProviderIDFallback: file.Global.ProviderIDFallback,
		MaxExpiration:      c.maxExpiration(file.CSRApproval.MaxExpiration),
	}

	oneOf(c, path{"global", "providerIDFallback"}, compiled.ProviderIDFallback, FallbackUUID, FallbackNodeIP)
	oneOf(c, path{"ipam", "blockSize"}, file.IPAM.BlockSize, BlockSizeAuto)

	if reasons := validation.IsValidLabelValue(compiled.ClusterName); len(reasons) > 0 {
		c.refuse(path{"global", "clusterName"}, "must be fit for a label: %s", strings.Join(reasons, "; "))
	}

	compiled.Rules, compiled.rules = c.rules(file.Transformations), len(file.Transformations)

	compiled.NodeSelector = c.selector(path{"nodes", "nodeSelector"}, file.Nodes.NodeSelector, rules.CompileSelector)
	compiled.AllowedSANs = c.allowedSANs(file.CSRApproval.AllowedSANs)
	compiled.Pools = c.pools(file.IPAM)

	return compiled
}

func (c compiler) rules(list []rules.Rule) *rules.Set {
	rules, mistakes := rules.Compile(list)
	c.refuseAll(path{"transformations"}, mistakes)

	return rules
}

func oneOf[T ~string](c compiler, p path, got T, allowed ...T) {
	if got != "" && !slices.Contains(allowed, got) {
		c.refuse(p, "must be %s, not %s", strings.Join(texts(allowed), " or "), quote(string(got)))
	}
}

func texts[T ~string](list []T) []string {
	s := make([]string, 0, len(list))
	for _, t := range list {
		s = append(s, string(t))
	}

	return s
}

// selector is nil, which selects all, if there are no terms.
func (c compiler) selector(p path, terms []rules.SelectorTerm, compile func([]rules.SelectorTerm) (*rules.Selector, []rules.CompileError)) *rules.Selector {
	if len(terms) == 0 {
		return nil
	}

	selector, mistakes := compile(terms)
	c.refuseAll(p, mistakes)

	return selector
}

func (c compiler) maxExpiration(s string) time.Duration {
	if s == "" {
		return DefaultMaxExpiration
	}

	at := path{"csrApproval", "maxExpiration"}

	d, err := time.ParseDuration(s)

	switch {
	case err != nil:
		c.refuse(at, "must be a duration such as 720h or 90m, not %s", quote(s))
	case d < MinExpiration:
		c.refuse(at, "%s is less than Kubernetes allows (%s)", s, MinExpiration)
	}

	return d
}

func (c compiler) allowedSANs(entries []AllowedSANs) []CompiledSANs {
	var list []CompiledSANs

	names := map[string]int{}

	for i, e := range entries {
		p := path{"csrApproval", "allowedSANs", i}
		c.unique(names, p, e.Name)

		allowed := CompiledSANs{Name: e.Name, Selector: c.selector(p.with("nodeSelector"), e.NodeSelector, rules.CompileSelector)}

		if len(e.DNSNames)+len(e.IPAddresses) == 0 {
			c.refuse(p, "allows nothing: there are neither dnsNames nor ipAddresses")
		}

		for j, name := range e.DNSNames {
			allowed.DNSNames = append(allowed.DNSNames, c.dnsName(p.with("dnsNames", j), name))
		}

		for j, s := range e.IPAddresses {
			allowed.IPAddresses = append(allowed.IPAddresses, c.address(p.with("ipAddresses", j), s))
		}

		list = append(list, allowed)
	}

	return list
}

// unique refuses a name that an earlier entry of the list has; the empty one is none.
func (c compiler) unique(names map[string]int, p path, name string) {
	if name == "" {
		return
	}

	if first, taken := names[name]; taken {
		line, _ := c.root.position(slices.Concat(p[:len(p)-1], path{first, "name"}))
		c.refuse(p.with("name"), "taken by the entry in line %d", line)

		return
	}

	names[name], _ = p[len(p)-1].(int)
}

func (c compiler) dnsName(p path, name string) string {
	name = strings.ToLower(name)

	if strings.Contains(name, "*") {
		c.refuse(p, "%s is a wildcard; names must be given in full", quote(name))
	} else if _, err := netip.ParseAddr(name); err == nil {
		c.refuse(p, "%s is an address; it belongs to ipAddresses", quote(name))
	} else if len(validation.IsDNS1123Subdomain(name)) > 0 {
		c.refuse(p, "%s is not a DNS name", quote(name))
	} else if isClusterName(name) {
		c.refuse(p, "%s is a name of the cluster itself, which no kubelet may have", quote(name))
	}

	return name
}

// isClusterName tells whether clients inside the cluster know services by that name, or every machine itself.
func isClusterName(name string) bool {
	if slices.Contains([]string{"kubernetes", "kubernetes.default", "localhost"}, name) {
		return true
	}

	return slices.ContainsFunc([]string{".svc", ".cluster.local", ".localhost"}, func(suffix string) bool { return strings.HasSuffix(name, suffix) })
}

func (c compiler) address(p path, s string) netip.Addr {
	addr, err := netip.ParseAddr(s)
	addr = addr.Unmap()

	switch {
	case err != nil:
		c.refuse(p, "%s is not an IP address", quote(s))
	case addr.Zone() != "":
		c.refuse(p, "%s has a zone, which means nothing to others", quote(s))
	case !addr.IsGlobalUnicast():
		c.refuse(p, "%s is no unicast address that others can reach", quote(s))
	}

	return addr
}

func (c compiler) pools(ipam IPAM) []CompiledPool {
	var (
		list []CompiledPool
		all  []pooled
	)

	names := map[string]int{}

	for i, e := range ipam.Pools {
		p := path{"ipam", "pools", i}
		c.unique(names, p, e.Name)

		if e.Name == "" {
			c.refuse(p.with("name"), "must not be empty")
		}

		pool := CompiledPool{Name: e.Name, Selector: c.selector(p.with("nodeSelector"), e.NodeSelector, rules.CompileNodeSelector)}

		cidrs := c.cidrs(p.with("cidrs"), e)
		for _, cidr := range cidrs {
			pool.CIDRs = append(pool.CIDRs, cidr.prefix)
		}

		pool.MaskSizeIPv4, pool.MaskSizeIPv6 = c.maskSizes(p, e, pool.CIDRs)
		pool.BlockSizeAuto = ipam.BlockSize == BlockSizeAuto && pool.MaskSizeIPv4 == 0

		for _, prefix := range pool.CIDRs {
			c.checkMaskSize(p, e, pool, prefix)
		}

		list = append(list, pool)
		all = append(all, cidrs...)
	}

	c.refuseOverlaps(all)

	if ipam.BlockSize == BlockSizeAuto {
		list = append(list, CompiledPool{BlockSizeAuto: true})
	}

	return list
}

// pooled is a CIDR of a pool, and where it is written.
type pooled struct {
	prefix netip.Prefix
	pool   string
	path   path
}

func (c compiler) cidrs(p path, e Pool) (list []pooled) {
	if len(e.CIDRs) == 0 {
		c.refuse(p, "must not be empty")
	}

	for i, s := range e.CIDRs {
		if prefix, ok := c.cidr(p.with(i), s); ok {
			list = append(list, pooled{prefix: prefix, pool: e.Name, path: p.with(i)})
		}
	}

	return list
}

func (c compiler) cidr(p path, s string) (netip.Prefix, bool) {
	prefix, err := netip.ParsePrefix(s)

	switch {
	case err != nil:
		c.refuse(p, "%s is not a CIDR such as 10.244.0.0/16", quote(s))
	case prefix.Addr().Is4In6():
		c.refuse(p, "%s is IPv4 written as IPv6", quote(s))
	case prefix != prefix.Masked():
		c.refuse(p, "%s has bits beyond its prefix length; did you mean %s?", quote(s), prefix.Masked())
	case prefix.Bits() == 0:
		c.refuse(p, "%s is all there is", quote(s))
	default:
		return prefix, true
	}

	return netip.Prefix{}, false
}

// maskSizes are the pool's, whichever key they are from.
func (c compiler) maskSizes(p path, e Pool, cidrs []netip.Prefix) (v4, v6 int) {
	c.between(p.with("maskSizeIPv4"), e.MaskSizeIPv4, 32)
	c.between(p.with("maskSizeIPv6"), e.MaskSizeIPv6, 128)

	if e.MaskSize == 0 {
		return e.MaskSizeIPv4, e.MaskSizeIPv6
	}

	hasV4 := slices.ContainsFunc(cidrs, func(prefix netip.Prefix) bool { return prefix.Addr().Is4() })
	hasV6 := slices.ContainsFunc(cidrs, func(prefix netip.Prefix) bool { return prefix.Addr().Is6() })

	switch {
	case e.MaskSizeIPv4 != 0 || e.MaskSizeIPv6 != 0:
		c.refuse(p.with("maskSize"), "does not go together with maskSizeIPv4 and maskSizeIPv6")
	case hasV4 && hasV6:
		c.refuse(p.with("maskSize"), "the pool has CIDRs of both families: say maskSizeIPv4 and maskSizeIPv6")
	case hasV4:
		return e.MaskSize, 0
	}

	return 0, e.MaskSize
}

func (c compiler) between(p path, size, bits int) {
	if size < 0 || size > bits {
		c.refuse(p, "%d is not between 1 and %d", size, bits)
	}
}

// checkMaskSize refuses a mask size that is not for the CIDR, and a CIDR that no usual mask size is for.
func (c compiler) checkMaskSize(p path, e Pool, pool CompiledPool, prefix netip.Prefix) {
	// The usual ones are the defaults of the flags.
	key, size, usual, auto := "maskSizeIPv6", pool.MaskSizeIPv6, 80, false
	if prefix.Addr().Is4() {
		key, size, usual, auto = "maskSizeIPv4", pool.MaskSizeIPv4, 24, pool.BlockSizeAuto
	}

	if e.MaskSize != 0 {
		key = "maskSize"
	}

	if size != 0 {
		if _, err := cidrset.NewPool(prefix, size); err != nil {
			c.refuse(p.with(key), "%v", err)
		}
	} else if !auto && prefix.Bits() > usual {
		c.refuse(p.with(key), "missing: it must be said for a CIDR as small as %s", prefix)
	}
}

// refuseOverlaps refuses each CIDR that overlaps an earlier one. Sorted by address, a CIDR comes right after those that contain it.
func (c compiler) refuseOverlaps(all []pooled) {
	sorted := slices.Clone(all)
	slices.SortStableFunc(sorted, func(a, b pooled) int { return a.prefix.Compare(b.prefix) })

	for i, last := 1, 0; i < len(sorted); i++ {
		if !sorted[last].prefix.Overlaps(sorted[i].prefix) {
			last = i

			continue
		}

		first, second := sorted[last], sorted[i]
		firstLine, _ := c.root.position(first.path)

		if secondLine, _ := c.root.position(second.path); secondLine < firstLine {
			first, second, firstLine = second, first, secondLine
		}

		c.refuse(second.path, "%s overlaps %s of pool %s in line %d", second.prefix, first.prefix, quote(first.pool), firstLine)
	}
}
